"""Bytes of a plan: tapes of activations, weights, gradients and optimizer."""
