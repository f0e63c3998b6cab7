"""Self-attention, positions, and kernels."""
