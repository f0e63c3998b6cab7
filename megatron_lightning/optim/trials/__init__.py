"""Trials that show what an optimizer reads in a step."""
