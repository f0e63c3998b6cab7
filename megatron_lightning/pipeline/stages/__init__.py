"""Stages of a module: units, boundary crossing, and calls of a rank's part."""
