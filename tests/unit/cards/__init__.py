"""Cards: what holds for a model, and the record of it."""
