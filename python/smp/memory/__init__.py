"""Where parameters live (real here, placeholders for another rank's, not yet anywhere), and what is
kept of a forward until its backward."""

from smp.memory.delay import delay_param_initialization, on_meta
from smp.memory.flat import is_cache, tensors_in
from smp.memory.given import Change, Given, Kept, Own
from smp.memory.initialise import initialise_again, initialise_delayed
from smp.memory.materialize import cast, fill, make_placeholder, make_real
from smp.memory.originals import keep_original
from smp.memory.recompute import is_recomputing, recompute
from smp.memory.requests import Request, asking, fulfil, take_request

__all__ = [
    "Change",
    "Given",
    "Kept",
    "Own",
    "Request",
    "asking",
    "cast",
    "delay_param_initialization",
    "fill",
    "fulfil",
    "initialise_again",
    "initialise_delayed",
    "is_cache",
    "is_recomputing",
    "keep_original",
    "make_placeholder",
    "make_real",
    "on_meta",
    "recompute",
    "take_request",
    "tensors_in",
]
