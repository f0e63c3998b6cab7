"""Checks of what a user connects to the strategy."""
