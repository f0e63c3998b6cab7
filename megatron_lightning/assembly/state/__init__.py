"""State of a rank's part as shards, and full tensors of it."""
