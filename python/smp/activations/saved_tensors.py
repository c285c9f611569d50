"""Keeps what autograd saves in forwards in host memory, without computing anything again.

Hooks on saved tensors hand each one to `csrc/memory/activation_store.h`, which decides what leaves
and when it comes back. Checkpointed calls in such a forward save no tensors, and nothing changes in
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import smp._C as _C
from smp.activations.recompute import is_recomputing
from smp.modules import packed
from smp.modules.forwards import Forward
from smp.world import runtime


class _Step:
    """The step whose parameters the store knows."""

    number: int | None = None


def offloading(current: runtime.Runtime) -> Callable[[Forward], Forward] | None:
    """Returns what makes forwards keep their saved tensors in host memory; None: nothing does.

    Args:
        current: the runtime, whose `offload_activations` may be "all".
    """
    if current.rank.config.offload_activations != "all":
        return None
    return functools.partial(_around, current, _Step())


def _around(current: runtime.Runtime, known: _Step, forward: Forward) -> Forward:
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        store = current.activation_store
        if store is None or not torch.is_grad_enabled() or is_recomputing():
            return forward(*args, **kwargs)
        if known.number != (step := _C.current_step()):
            known.number = step
            store.set_resident(_resident(current))
        saving = _C.SavingForward(store)
        try:
            with saved_tensors_hooks(functools.partial(_pack, saving), _unpack):
                return forward(*args, **kwargs)
        finally:
            saving.end()

    return offloaded


def _resident(current: runtime.Runtime) -> list[Tensor]:
    """Returns the tensors of all models, which stay on the device in any case."""
    tensors = (
        tensor
        for engine in current.wrapped.engines.values()
        for tensor in (*engine.root.parameters(), *engine.root.buffers())
    )
    return [part for tensor in tensors for part in packed.parts_of(tensor).values()]


def _pack(saving: _C.SavingForward, tensor: Tensor) -> Any:
    if hasattr(tensor, "local"):  # a handle of a tensor on another rank, whose data come later
        return tensor, None
    root = tensor._base if tensor._is_view() else tensor
    if not isinstance(root, nn.Parameter):
        saved = saving.save(tensor)
        if saved is not None:
            return saved
    # A result itself would keep its own node alive.
    return tensor if tensor.is_leaf else tensor.detach(), tensor._version


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, _C.SavedTensor):
        return kept.tensor()
    tensor: Tensor = kept[0]
    if kept[1] is not None and tensor._version != kept[1]:
        # Hooks take the place of PyTorch's own check.
        raise RuntimeError(
            f"{_C.rank_prefix()}a tensor of shape {list(tensor.shape)} that is needed to compute "
            f"gradients was changed in place (it is at version {tensor._version}; expected version "
            f"{kept[1]}); change a copy (.clone())"
        )
    return tensor
