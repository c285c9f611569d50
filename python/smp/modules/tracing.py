"""Marks runs of a model in addition to the real one, such as the tracing pass of the first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import smp._C as _C


class _Tracing:
    """The number of traces that run now, for `smp.is_tracing`."""

    depth = 0
    recorded = 0  # number of these that record operators and modules


def is_tracing() -> bool:
    """Returns whether this process runs the tracing pass of the first step.

    The step function runs once more for it, up to the call of the model. Side effects before that
    call can be guarded with this. The result is also True while the check of the first step runs
    the model, and only the model, once more, and while the check of the loss runs the step function
    three times.
    """
    return _Tracing.depth > 0


def is_recorded() -> bool:
    """Returns whether a trace records the running model."""
    return _Tracing.recorded > 0


@contextmanager
def tracing() -> Iterator[None]:
    """Marks the tracing pass, see `is_tracing`. Split modules run on this rank alone."""
    _Tracing.depth += 1
    _Tracing.recorded += 1
    was_alone = _C.set_tensor_parallel_alone(True)
    try:
        yield
    finally:
        _C.set_tensor_parallel_alone(was_alone)
        _Tracing.recorded -= 1
        _Tracing.depth -= 1


@contextmanager
def running_again() -> Iterator[None]:
    """Marks a run of a model in addition to the real one; split modules communicate as usual."""
    _Tracing.depth += 1
    try:
        yield
    finally:
        _Tracing.depth -= 1
