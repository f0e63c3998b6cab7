"""Hugging Face folders and streams of a model that trains."""
