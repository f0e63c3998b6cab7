"""Keys and states of generated text, and recomputed and offloaded activations of layers."""
