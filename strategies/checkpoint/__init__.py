"""Checkpoints through Lightning's hooks."""
