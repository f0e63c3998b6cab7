"""Read checkpoints: sources of tensors, and loading them in any layout."""
