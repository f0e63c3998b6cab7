"""Faults on purpose, to rehearse a long run."""
