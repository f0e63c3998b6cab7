"""Bytes of a checkpoint: manifest, shards, checksums, state and storage."""
