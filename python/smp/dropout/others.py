"""Generators of random numbers of Python and NumPy, where NumPy is installed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def others_kept() -> Iterator[None]:
    """The generators are behind the block as they were."""
    numpy = _numpy_random()
    states = random.getstate(), None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.set_state(states[1])


def seed_others() -> int:
    """Seeds them, always with the same number.

    Returns:
        `state_of_others`.
    """
    numpy = _numpy_random()
    random.seed(0)
    if numpy is not None:
        numpy.seed(0)
    return state_of_others()


def state_of_others() -> int:
    """Returns a hash of their states."""
    numpy = _numpy_random()
    state = None
    if numpy is not None:
        _, keys, *others = numpy.get_state()
        state = (keys.tobytes(), *others)
    return hash((random.getstate(), state))


def _numpy_random() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy.random
