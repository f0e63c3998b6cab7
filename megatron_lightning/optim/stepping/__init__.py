"""Optimizers that step shards, main params or full matrices, and their state."""
