"""Optimizers of shards, main params or full matrices, and the optimizer state."""
