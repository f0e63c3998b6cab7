"""Hugging Face folders: found, read, recorded in checkpoints and written."""
