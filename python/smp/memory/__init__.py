"""Where parameters live: real here, or placeholders for another rank's."""

from smp.memory.materialize import make_placeholder, make_real

__all__ = ["make_placeholder", "make_real"]
