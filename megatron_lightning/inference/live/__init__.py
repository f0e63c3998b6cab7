"""Text by the model of a run: an engine for its live weights, and its tokenizer."""
