"""Conversations as tokens: formats, templates, tokenizers, and the tokens to train."""
