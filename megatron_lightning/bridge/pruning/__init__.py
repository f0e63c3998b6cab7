"""Smaller models from larger ones: units that matter least are left out of a folder."""
