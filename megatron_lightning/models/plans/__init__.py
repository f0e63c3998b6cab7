"""Sharding plans: ours, and those of models of transformers."""
