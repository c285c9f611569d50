"""The import path of the public data-parallel interface; everything is in `smp.v1`."""

# The last release of that interface with functions of its own.
__version__ = "1.4.0"
