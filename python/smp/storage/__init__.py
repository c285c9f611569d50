"""How the parameters of a rank are stored: whole, in flat buckets, or in shards."""
