"""Samples of pre-training: fixed lengths, blends, and fill-in-the-middle."""
