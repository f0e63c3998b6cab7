"""Lazy tensors of files, and the moves that make parameters of them and back."""
