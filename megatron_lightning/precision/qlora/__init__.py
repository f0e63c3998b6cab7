"""Frozen base weights as quantized data beside trained adapters."""
