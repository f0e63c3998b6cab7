"""Sampled texts with rewards: rows of a generation, in files and as batches."""
