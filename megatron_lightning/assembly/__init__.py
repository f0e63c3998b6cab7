"""A full module becomes this rank's part: partitioned, sharded, materialized; and that part's state as shards."""
