"""Copies of every rank's state on its own node and the next."""
