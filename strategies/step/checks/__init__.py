"""Checks of a user's code in the steps of a run: refusals, warnings and hints."""
