"""The import path of the public interface; everything is in `smp`."""

from smp._version import __version__

__all__ = ["__version__"]
