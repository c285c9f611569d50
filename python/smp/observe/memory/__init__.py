"""Out of memory: what a rank held, and what the partition expected of it."""
