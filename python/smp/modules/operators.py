"""Reads what operators do to the memory of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree


def written_tensors(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Returns the tensors that a call of an operator writes to."""
    if not func._schema.is_mutable:
        return []
    written: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, Tensor)]


def memory_of(tensor: Tensor) -> StorageWeakRef:
    """Returns a key for a tensor's memory.

    A weak reference keeps the address from being used again, but not the memory.
    """
    return StorageWeakRef(tensor.untyped_storage())
