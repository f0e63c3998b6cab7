"""Masked samples for encoders (BERT) and encoder-decoders (T5)."""
