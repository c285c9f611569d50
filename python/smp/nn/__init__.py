"""Distributed modules and the fused operators they are made of."""
