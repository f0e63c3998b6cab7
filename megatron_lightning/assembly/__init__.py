"""Reduction of a full module to this rank's part (partition, shard, materialize), and the part's
state as shards.
"""
