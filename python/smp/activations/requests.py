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
    """What shall be one checkpoint; travels with a call.

    Attributes:
        modules: one module, or several that take the result of the one before.
        preserve_rng_state: see `recompute`.
    """

    modules: tuple[nn.Module, ...]
    preserve_rng_state: bool = True


_request: ContextVar[Request | None] = ContextVar("smp_checkpoint_request", default=None)


@contextlib.contextmanager
def asking(request: Request) -> Iterator[None]:
    """The next call of the first of its modules that leaves this rank takes the request along."""
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


def take_request(module: nn.Module) -> Request | None:
    """The request that waits for a call of this module; it is taken once."""
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
    """Runs what was asked for, here.

    Args:
        request: somebody asked for.
        forward: of its first module.
        args, kwargs: of the call; one positional argument if there are several modules.
        seeds: of the modules, each of which would have had random numbers of its own if the caller
            had called them one by one; none: they go on with the same numbers.
        device: whose generator is seeded, besides the CPU's.
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
