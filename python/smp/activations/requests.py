"""Asks for the next call of a module to be checkpointed, wherever the module runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn

import smp._C as _C
from smp.activations.recompute import recompute


class Request(NamedTuple):
    """A request to run modules as one checkpoint; it travels with a call.

    Attributes:
        modules: one module, or several that take the result of the one before.
        preserve_rng_state: see `recompute`.
    """

    modules: tuple[nn.Module, ...]
    preserve_rng_state: bool = True


_request: ContextVar[Request | None] = ContextVar("smp_checkpoint_request", default=None)


@contextlib.contextmanager
def asking(request: Request) -> Iterator[None]:
    """Attaches a request to the next call of its first module that leaves this rank."""
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


def take_request(module: nn.Module) -> Request | None:
    """Returns and removes the request that waits for a call of this module, if any."""
    request = _request.get()
    if request is None or request.modules[0] is not module:
        return None
    _request.set(None)
    return request


def fulfil(
    request: Request,
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    seeds: Sequence[int] = (),
    device: torch.device | None = None,
) -> Any:
    """Runs the modules of a request on this rank.

    Args:
        request: request that came with the call.
        forward: forward of its first module.
        args, kwargs: arguments of the call; one positional argument if there are several modules.
        seeds: seed of each module; the caller would have given each call its own random numbers.
            If empty, the modules go on with the same numbers.
        device: device whose generator is seeded, besides the CPU's.
    """
    function = forward
    if len(request.modules) > 1:

        def function(value: Any) -> Any:
            for idx, module in enumerate(request.modules):
                if seeds and idx > 0:
                    _C.seed_generators(seeds[idx] % 2**64, str(device))
                value = module(value)
            return value

    return recompute(
        function,
        args,
        kwargs,
        preserve_rng_state=request.preserve_rng_state,
        modules=request.modules,
    )
