"""Guards of the steps: batches, collectives, the sharding plan, sequences."""
