"""Parameters of the meta device whose values are read from files, each on its own rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from smp.modules import packed
from smp.modules.materialize import exchange

_SOURCE = "_smp_source"

#: function of a device, which returns the values
Source = Callable[[torch.device], Tensor]


def set_source(parameter: nn.Parameter, read: Source) -> None:
    """Gives a parameter of the meta device a source of its values.

    The source is read when the model is partitioned, on ranks with the parameter only, one source
    after the other. So no rank has values of others, and one whole value beside its own at most.

    Args:
        parameter: parameter in the form that it has with values; its object is kept.
        read: function that returns the values in this form.
    """
    setattr(parameter, _SOURCE, read)


def has_source(parameter: nn.Parameter) -> bool:
    """Returns whether a parameter waits for the values of a source."""
    return parameter.is_meta and _SOURCE in parameter.__dict__


def take_value(parameter: nn.Parameter, device: torch.device) -> None:
    """Gives a parameter the values of its source.

    Args:
        parameter: parameter with a source.
        device: device of this process.
    """
    with torch.no_grad():
        value = parameter.__dict__.pop(_SOURCE)(device)
        if packed.is_packed(parameter):
            packed.put(parameter, value)
        else:
            exchange(parameter, value)
