"""Gradients of a fit, from the end of backward to the update."""
