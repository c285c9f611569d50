"""The parts of `make gpu`: measurements on one GPU. See ../README.md."""
