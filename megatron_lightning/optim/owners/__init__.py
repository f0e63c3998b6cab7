"""Optimizers that read full tensors: one rank owns and steps each."""
