"""Where parameters live: real here, placeholders for another rank's, or not yet anywhere."""

from smp.memory.materialize import (
    cast,
    delay_param_initialization,
    fill,
    initialise_delayed,
    make_placeholder,
    make_real,
)

__all__ = [
    "cast",
    "delay_param_initialization",
    "fill",
    "initialise_delayed",
    "make_placeholder",
    "make_real",
]
