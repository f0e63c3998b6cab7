"""Faults on purpose, to rehearse what a long run meets."""
