"""Extra runs of a module's code that leave no effects behind."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smp._device import forked_generators
from smp.modules import collected
from smp.modules.argument_containers import ArgumentContainers, fill
from smp.modules.flat import tensors_in
from smp.modules.state_changes import StateComparison


def run_aside(
    module: nn.Module, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Calls a function with a module's arguments and undoes its side effects.

    Attributes and buffers of the module and of those below it, containers and objects among the
    arguments, and the generators of torch are as before. Tensors that are arguments are copied.

    Args:
        module: module whose code runs.
        run: function that gets the arguments; its result is dropped.
        args, kwargs: arguments of a call of the module.

    Returns:
        Tensors inside of arguments that were written in place, which is not undone.

    Raises:
        Exception: an error of `run`; effects are undone then as well.
    """
    given = tensors_in([*args, *kwargs.values()])
    watch = StateComparison([module], copies=True, every=True)
    containers = ArgumentContainers.of_call(args, kwargs)
    written = _Written(given)
    context = contextvars.copy_context()
    for var, container in collected.in_context():
        context.run(var.set, collected.outline(container))
    try:
        with random_state_kept(device_of(given)):
            # Copies, as some modules change what they get in place.
            copied = {key: _copied(value) for key, value in kwargs.items()}
            context.run(run, *map(_copied, args), **copied)
    finally:
        watch.undo()
        for number, contents in containers.changed_from():
            fill(containers.containers[number], contents)
    return written.since()


class _Written:
    """A record of tensors, to find those written in place since it was made.

    Tensors of inference mode count no versions, so their values are kept.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._before = [(x, x.clone() if x.is_inference() else x._version) for x in tensors]

    def since(self) -> list[Tensor]:
        return [tensor for tensor, before in self._before if not _is_as(tensor, before)]


def _is_as(tensor: Tensor, before: Tensor | int) -> bool:
    if isinstance(before, int):
        return tensor._version == before
    return bool(((tensor == before) | ((tensor != tensor) & (before != before))).all())  # or NaN


def has_no_data(tensor: Tensor) -> bool:
    """Returns whether a tensor is on the meta device, or a fake one of a compiler."""
    return tensor.is_meta or type(tensor).__name__ == "FakeTensor"


def device_of(given: Sequence[Tensor]) -> torch.device:
    """Returns the device on which code with these tensors draws random numbers."""
    return next((t.device for t in given if t.device.type != "cpu"), torch.device("cpu"))


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@contextlib.contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restores the generators of torch at the end of the context."""
    with forked_generators(device):
        yield
