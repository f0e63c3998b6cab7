"""A batch in a pipeline run: micro-batches, parts of sequences, and what all stages learn of it."""
