"""Checks of a module, its layout and its ranks."""
