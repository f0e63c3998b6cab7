"""Gradients of a step, from the end of backward to the update of the weights."""
