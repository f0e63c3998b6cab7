"""Slots of requests in the key cache, and keys kept of ended texts."""
