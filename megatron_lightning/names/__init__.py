"""Names of Megatron-LM, Megatron Bridge and NeMo 2.0, and the names here: read-only tables."""
