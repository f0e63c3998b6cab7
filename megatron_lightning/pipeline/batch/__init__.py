"""A batch in a pipeline run: micro-batches, parts of sequences, and values sent to all stages."""
