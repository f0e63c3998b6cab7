"""Attention over sequences that are divided over ranks: one backend a file."""
