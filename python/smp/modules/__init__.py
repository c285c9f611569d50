"""Observes forwards: their arguments, results and writes, and the modules around them."""
