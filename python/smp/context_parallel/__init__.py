"""Context parallelism: ranks compute parts of each sequence ([how](docs/design/context_parallel.md))."""
