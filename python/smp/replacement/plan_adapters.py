"""Splits adapters of PEFT with the base layers that a plan names."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from torch import nn

from smp.replacement import plans
from smp.replacement.plan_cuts import NewForm, SplitState

_ROWS = (plans.ROW, plans.SPLIT_ROW)


@dataclass(frozen=True)
class Adapters:
    """The low-rank matrices beside a linear layer.

    Attributes:
        down, up: paths of the layers into and out of the low rank, one for each adapter.
    """

    down: tuple[str, ...]
    up: tuple[str, ...]


def is_adapted(module: nn.Module) -> bool:
    """Returns whether a module is a linear layer wrapped in plain adapters of low rank (LoRA).

    Only a PEFT that is imported already is asked; without one there are no adapters.
    """
    lora = sys.modules.get("peft.tuners.lora.layer")
    if lora is None or type(module) is not lora.Linear:
        return False
    layers = [*_parts(module, "lora_A"), *_parts(module, "lora_B")]
    return (
        type(module.base_layer) is nn.Linear
        and all(type(layer) is nn.Linear for layer in layers)
        and not getattr(module, "lora_variant", None)
        and not any(getattr(module, "use_dora", {}).values())
        and not module.merged
        and not getattr(module, "fan_in_fan_out", False)
    )


def _parts(module: nn.Module, kind: str) -> list[nn.Module]:
    return list(module.get_submodule(kind).children())


def find_adapters(state: SplitState) -> dict[str, Adapters]:
    """Moves the words of adapted layers to their base layers.

    Returns:
        adapters by path of the base layer.
    """
    found = {}
    for path, word in list(state.words.items()):
        module = state.modules.get(path)
        if module is None or not is_adapted(module):
            continue
        base = f"{path}.base_layer"
        names = {kind: tuple(getattr(module, kind)) for kind in ("lora_A", "lora_B")}
        down, up = (tuple(f"{path}.{kind}.{name}" for name in own) for kind, own in names.items())
        found[base] = Adapters(down, up)
        del state.words[path]
        state.words[base] = word
    return found


def decide_adapters(state: SplitState, adapters: dict[str, Adapters]) -> None:
    """Splits adapters of split layers: `lora_B` beside columns, `lora_A` beside rows."""
    for base, own in adapters.items():
        cut, word = state.cuts.get(base), state.words.get(base)
        if cut is None or word is None:
            continue
        for path in own.down if word in _ROWS else own.up:
            module = state.modules[path]
            dims = {
                name: how
                for name, how in cut.dims.items()
                if module._parameters.get(name) is not None
            }
            if "weight" in dims and "bias" not in dims and word not in _ROWS:
                if module._parameters.get("bias") is not None:
                    dims["bias"] = dims["weight"]
            state.cuts[path] = NewForm(cut.make_class, dims, cut.partial, dict(cut.attributes))
            state.words[path] = word
