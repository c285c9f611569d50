"""Finds adapters of PEFT in a module; a distributed form of the module would lack them."""

from __future__ import annotations

import sys

from torch import nn


def adapter_in(module: nn.Module) -> str | None:
    """Returns name and kind of an adapter in a module, or None if there is none.

    Only a PEFT that is imported already is asked; without one there are no adapters.
    """
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return None
    for name, child in module.named_modules():
        if isinstance(child, tuners.BaseTunerLayer):
            kind = type(child).__module__.split(".")[-2]
            return f"'{name}' ({kind})" if name else kind
    return None
