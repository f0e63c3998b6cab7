"""Buffers held by several ranks."""
