"""Kept tensors of layers: keys and states of generated text, recomputed and offloaded activations."""
