"""Gradients of a step: buckets, their reduction, and the gather of parameters."""
