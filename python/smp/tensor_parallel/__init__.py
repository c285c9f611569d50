"""Splitting of modules over the ranks of a tensor-parallel group."""
