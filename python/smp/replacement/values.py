"""Copies the values of a replaced module to its distributed form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smp.initial.initialise import initialise_delayed
from smp.initial.originals import keep_original
from smp.modules.materialize import fill
from smp.tensor_parallel import sharding
from smp.tensor_parallel.registry import Registration


@dataclass(frozen=True)
class Values:
    """The state of an original under the names of its distributed form.

    Attributes:
        state: whole tensors by name.
        missing: names of parameters of the distributed form without a value.
        unused: names of values that the distributed form has no place for.
    """

    state: Mapping[str, Tensor]
    missing: tuple[str, ...]
    unused: tuple[str, ...]


def values_for(made: nn.Module, module: nn.Module, registration: Registration) -> Values:
    """Returns what a distributed form takes from the state of the original.

    Args:
        made: the distributed form.
        module: the original.
        registration: registration of the original's class.
    """
    state: Mapping[str, Tensor] = module.state_dict()
    if registration.translators is not None:
        state = registration.translators[1](dict(state))
    places = made.state_dict(keep_vars=True)
    missing = tuple(
        name
        for name, parameter in made.named_parameters()
        if name not in state or list(state[name].shape) != sharding.whole_shape(parameter)
    )
    unused = tuple(key for key in state if key not in places or key in missing)
    return Values(state, missing, unused)


def take_over_values(
    module: nn.Module,
    made: nn.Module,
    registration: Registration,
    name: str,
    values: Values | None,
    device: torch.device,
) -> None:
    """Copies the weights of the original where it has them, and initialises the others.

    Args:
        module: the original.
        made: the distributed form.
        registration: registration of the original's class.
        name: name of the module in the model.
        values: values of the original, or None if they were never initialised.
        device: device on which new weights are made.
    """
    if values is not None:
        _inherit(made, values)
    if any(parameter.is_meta for parameter in module.parameters()):
        # Whole tensors of the original are made one by one when needed, and cut.
        translate = None if registration.translators is None else registration.translators[1]
        keep_original(made, None if values is None else module, translate)
        return
    initialise_delayed(made, lambda _: True, device, name=name, on_ready=_move_to_cpu)


def _move_to_cpu(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.cpu()


def _inherit(made: nn.Module, values: Values) -> None:
    """Fills parameters with their slices of whole tensors; parameters without values stay."""
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name in values.missing or values.state[name].is_meta:
                continue
            part = sharding.slice_of(values.state[name], sharding.interval_of(parameter))
            fill(parameter, part)
        for name, buffer in made.named_buffers():
            if name in values.state:
                buffer.copy_(values.state[name])
