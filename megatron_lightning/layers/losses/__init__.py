"""Losses of tokens and of answers, without gathered logits."""
