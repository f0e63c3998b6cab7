"""Attention over sequences sharded over ranks. Each file holds one backend."""
