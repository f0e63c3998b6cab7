"""Untouched models of ``transformers`` with the weights of a folder."""
