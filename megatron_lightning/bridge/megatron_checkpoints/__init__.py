"""Checkpoints of Megatron-LM and Megatron Bridge."""
