"""Where parameters live (real here, placeholders for another rank's, not yet anywhere), and what is
kept of a forward until its backward."""

from smp.memory.materialize import (
    cast,
    delay_param_initialization,
    fill,
    initialise_delayed,
    make_placeholder,
    make_real,
)
from smp.memory.recompute import is_cache, is_recomputing, recompute
from smp.memory.requests import Request, asking, fulfil, take_request

__all__ = [
    "Request",
    "asking",
    "cast",
    "delay_param_initialization",
    "fill",
    "fulfil",
    "initialise_delayed",
    "is_cache",
    "is_recomputing",
    "make_placeholder",
    "make_real",
    "recompute",
    "take_request",
]
