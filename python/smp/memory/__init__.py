"""Where parameters live: real here, placeholders for another rank's, or not yet anywhere."""

from smp.memory.delay import delay_param_initialization, on_meta
from smp.memory.initialise import initialise_again, initialise_delayed
from smp.memory.materialize import cast, fill, make_placeholder, make_real
from smp.memory.originals import keep_original

__all__ = [
    "cast",
    "delay_param_initialization",
    "fill",
    "initialise_again",
    "initialise_delayed",
    "keep_original",
    "make_placeholder",
    "make_real",
    "on_meta",
]
