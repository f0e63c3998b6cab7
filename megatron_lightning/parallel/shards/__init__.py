"""Shards of parameters: specs, plans, ties, and what other stages hold."""
