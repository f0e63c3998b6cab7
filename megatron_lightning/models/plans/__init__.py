"""Sharding plans of our models, and of models of transformers."""
