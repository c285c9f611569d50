"""Runs step functions that are called while there is no `DistributedModel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import smp._C as _C
from smp.world import runtime


def run_without_model(
    current: runtime.Runtime,
    name: str,
    num_microbatches: int,
    body: Callable[[int], None],
    *,
    trains: bool,
) -> None:
    """Runs the microbatches one after the other.

    Args:
        current: the runtime.
        name: name of the step function.
        num_microbatches: number of microbatches.
        body: runs one of them.
        trains: whether gradients are enabled.

    Raises:
        RuntimeError: a module got gradients; each rank would train it alone, with sums over
            microbatches.
    """
    rank = current.rank
    is_plain = rank.world_size == 1 and rank.config.microbatches == 1
    called: dict[nn.Module, list[tuple[Tensor, Tensor | None, int]]] = {}

    def note(module: nn.Module, args: Any) -> None:
        if module not in called:
            called[module] = [
                (p, p.grad, -1 if p.grad is None else p.grad._version)
                for p in module.parameters(recurse=False)
            ]

    watches = trains and not is_plain
    handle = register_module_forward_pre_hook(note) if watches else None
    try:
        for mb in range(num_microbatches):
            body(mb)
    finally:
        if handle is not None:
            handle.remove()
    for module, before in called.items():
        for parameter, grad, version in before:
            if parameter.grad is not grad or (grad is not None and grad._version != version):
                _refuse(current, name, module)


def _refuse(current: runtime.Runtime, name: str, module: nn.Module) -> None:
    raise RuntimeError(
        f"{_C.rank_prefix()}step '{name}' gave gradients to a {type(module).__name__}, but there "
        f"is no smp.DistributedModel, so each of the {current.rank.world_size} ranks would train a "
        f"model of its own, with gradients summed over its {current.rank.config.microbatches} "
        "microbatches. Wrap the model before the step: model = smp.DistributedModel(model), keep "
        "it as long as the step function is used, and call model.backward(loss) in the step "
        "function"
    )
