"""Weights as servers load them: formats, and the values that a server multiplies."""
