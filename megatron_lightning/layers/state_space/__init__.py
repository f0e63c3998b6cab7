"""Layers that carry a state along the sequence: Mamba-2."""
