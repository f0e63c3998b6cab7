"""Units that FSDP2 shards, and the reduction of their gradients."""
