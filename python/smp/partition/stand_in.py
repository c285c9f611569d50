"""Makes a model's result by shapes alone, for a function that goes on while it is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from smp._device import forked_generators
from smp.modules.forwards import uncover
from smp.partition.trace import empty_like, moved, ordinary, quiet
from smp.partition.trace_guard import exchange_tensors, untouched
from smp.tensor_parallel import regions


def stand_in(
    root: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
) -> Any:
    """Returns the result of a call with zero tensors; the model is as before afterwards.

    The call needs no memory for the model, which may be partitioned, and runs under the present
    grad mode. Tensors of the result are leaves.

    Args:
        root: the model.
        args, kwargs: arguments of the call.
        device: device of the result.

    Raises:
        Exception: the model cannot run without values.
    """
    with _shapes_only(root, device) as faked:
        call_args, call_kwargs = faked((tuple(args), dict(kwargs)))
        result = root(*call_args, **call_kwargs)
    # Inside of the mode these would be fake as well.
    return pytree.tree_map_only(Tensor, _zeros_like, result)


def reads_number(
    root: nn.Module, device: torch.device, loss_of: Callable[[Callable[[Any], Any], Tensor], Tensor]
) -> bool:
    """Returns whether a loss depends on a number; the model is as before afterwards.

    Nothing is computed: the graph of the loss, made by shapes alone, leads to the number or not.

    Args:
        root: the model, which may be partitioned.
        device: device of arguments.
        loss_of: function that returns the loss of the model, given a function that turns tensors of
            its arguments into ones without values, and the number.

    Raises:
        Exception: the loss cannot be made without values.
    """
    # A rank that finds out by itself has no others whose parts of split layers it could have.
    with regions.alone(), _shapes_only(root, device) as faked, torch.enable_grad():
        number = torch.ones((), device=device, requires_grad=True)
        loss = loss_of(faked, number)
        (grad,) = torch.autograd.grad(loss, number, torch.ones_like(loss), allow_unused=True)
    return grad is not None


@contextmanager
def _shapes_only(root: nn.Module, device: torch.device) -> Iterator[Callable[[Any], Any]]:
    """Lets a model run without values; yields a function that makes such arguments."""
    modules = tuple(root.modules())
    with untouched(modules, keep_values=False), forked_generators(device), quiet():
        for module in modules:
            uncover(module)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            exchange_tensors(modules, lambda t: empty_like(t, device))
            yield lambda tree: pytree.tree_map_only(
                Tensor, lambda t: moved(mode.from_tensor(ordinary(t)), device), tree
            )


def real_result(
    root: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> Any:
    """Returns the result of a call of a model that needs values; the model is as before afterwards.

    Args:
        root: a model that is not partitioned and has values, on any device.
        args, kwargs: arguments of the call; the model gets copies.
        device: device of the result.
    """
    parameters = root.parameters()
    home = next((parameter.device for parameter in parameters), device)
    with (
        untouched(tuple(root.modules()), keep_values=True),
        forked_generators(home),
        forked_generators(device),
    ):
        call_args, call_kwargs = pytree.tree_map_only(
            Tensor, lambda t: moved(ordinary(t), home, copy=True), (tuple(args), dict(kwargs))
        )
        result = root(*call_args, **call_kwargs)
    return pytree.tree_map_only(Tensor, lambda t: t.to(device), result)


def _zeros_like(fake: Tensor) -> Tensor:
    zeros = torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)
    return zeros.requires_grad_(fake.requires_grad)
