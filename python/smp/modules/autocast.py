"""Captures the autocast state of a thread as a value that can be sent with a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

#: per enabled device type: (device type, dtype)
AutocastState = tuple[tuple[str, torch.dtype], ...]


def capture(device: torch.device) -> AutocastState:
    """Returns the autocast state of the calling thread, for CPU and the type of ``device``."""
    types = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
    state: AutocastState = ()
    for kind in types:
        if torch.is_autocast_enabled(kind):
            state += ((kind, torch.get_autocast_dtype(kind)),)
    return state


@contextlib.contextmanager
def restore(state: AutocastState, device: torch.device) -> Iterator[None]:
    """Runs the body under a captured state; what was off then is off in the body.

    Args:
        state: state that :func:`capture` returned for ``device``.
        device: device of this process.
    """
    dtypes = dict(state)
    with contextlib.ExitStack() as stack:
        for kind in dict.fromkeys(("cpu", device.type)):
            if kind in dtypes:
                stack.enter_context(torch.autocast(kind, dtypes[kind], cache_enabled=False))
            elif torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def apply(state: AutocastState) -> Iterator[None]:
    """Runs the body under a captured state.

    The cache of cast weights is off: all threads of a process share it, and contexts of several
    microbatches take turns inside one autocast region.
    """
    with contextlib.ExitStack() as stack:
        for kind, dtype in state:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
        yield
