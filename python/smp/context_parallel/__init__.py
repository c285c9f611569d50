"""Context parallelism: the ranks of a group compute parts of each sequence."""
