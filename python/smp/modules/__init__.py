"""What there is to know of a forward: its arguments, results, writes, and the modules around it."""
