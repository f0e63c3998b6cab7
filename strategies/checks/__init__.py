"""Checks of everything a user connects to the strategy."""
