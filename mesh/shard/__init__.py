"""Shards: layer ranges of a checkpoint that compute for other nodes."""
