"""Loaders of a run: each data-parallel rank's share of the samples."""
