"""Reduction of a full module to this rank's part (partition, shard, materialize), and the state of
that part as shards.
"""
