"""The import path of the public v1 interface; everything is in `smp`."""

# Clients compare it to learn which parts of the interface there are: it counts the versions of
# the interface, not those of smp (`smp.__version__`).
__version__ = "1.15.0"
