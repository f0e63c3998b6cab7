"""Stages of a module: units, what crosses boundaries, and calls of a rank's part."""
