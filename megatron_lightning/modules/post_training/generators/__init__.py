"""Answers of a policy sampled by servers of its own, ahead of the updates."""
