"""What one GPU has to answer: the parts of `make gpu`. See ../README.md."""
