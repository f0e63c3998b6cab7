"""DataLoaders of a run: an end agreed on by all ranks, state in checkpoints, copies to a device."""
