"""Rank numbering, sizes of axes, and process groups."""
