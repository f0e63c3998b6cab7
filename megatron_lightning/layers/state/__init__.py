"""What layers keep: keys and states of generated text, recomputed and offloaded activations."""
