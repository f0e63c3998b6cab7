"""Units sharded by FSDP2, and the reduction of the units' gradients."""
