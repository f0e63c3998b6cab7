"""Copies of every rank's state on the rank's node and the next node."""
