"""Storage of a rank's parameters: whole, in flat buckets, or in shards."""
