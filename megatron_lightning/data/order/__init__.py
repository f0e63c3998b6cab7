"""Order of training samples: shares of ranks, growing batches, and the position to resume at."""
