"""Weights, folders and text of a live model."""
