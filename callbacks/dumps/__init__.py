"""Tensors of a training step, written to compare two runs."""
