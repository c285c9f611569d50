"""Faces for other libraries. Each module imports the library that it is for; `smp` imports none."""
