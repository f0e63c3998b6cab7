"""Values of a step: logs, metrics, buffers and random states, equal on all ranks of a replica."""
