"""Adapters that PEFT has put into a model; a distributed form of what is around has none."""

from __future__ import annotations

import sys

from torch import nn


def adapter_in(module: nn.Module) -> str | None:
    """Name and kind of an adapter in a module; None if there is none.

    PEFT is looked for among the imported packages only: without it there are none.
    """
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return None
    for name, child in module.named_modules():
        if isinstance(child, tuners.BaseTunerLayer):
            kind = type(child).__module__.split(".")[-2]
            return f"'{name}' ({kind})" if name else kind
    return None
