"""Translates names in state dicts between a model and its form with replaced modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.nn import DistributedModule
from smp.tensor_parallel import sharding
from smp.tensor_parallel.partial import PARTIAL_MARK
from smp.tensor_parallel.registry import Registration


def to_ours(registrations: Sequence[Registration], state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a state dict with the names of the distributed modules; such names are kept.

    Args:
        registrations: registrations of the modules that were replaced.
        state: state dict of the whole model.
    """
    for registration in registrations:
        if registration.translators is not None:
            state = registration.translators[1](dict(state))
    return state


def to_theirs(registrations: Sequence[Registration], state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict with the names that the model had before modules were replaced.

    Args:
        registrations: registrations of the modules that were replaced.
        state: state dict of the whole model.
    """
    result: dict[str, Any] = dict(state)
    for registration in registrations:
        if registration.translators is not None:
            result = registration.translators[0](result)
    return result


def refuse_pieces(
    root: nn.Module,
    registrations: Sequence[Registration],
    given: Mapping[str, Any],
    translated: Mapping[str, Any],
) -> None:
    """Refuses former names of a replaced module, unless the whole module is given.

    Translators recognise models by the names in whole layers. Of an incomplete layer they leave
    some names as they are, and a load that is not strict would drop these.

    Args:
        root: the model.
        registrations: registrations of the modules that were replaced.
        given: state dict that is to be loaded.
        translated: the same state dict after :func:`to_ours`.

    Raises:
        RuntimeError: keys of a module are incomplete; the text names a given and a missing one.
    """
    own = root.state_dict(keep_vars=True)
    if PARTIAL_MARK in given or all(key in translated for key in own):
        return  # the state dict is marked as having our names, or is complete
    former = to_theirs(registrations, _shapes_of(own)).keys()
    for prefix in _distributed(root):
        lacking = [
            key
            for key in own
            if key.startswith(prefix) and key not in former and key not in translated
        ]
        names = {
            name
            for key in former
            if key.startswith(prefix) and key not in own
            for name in _endings(key)
        }
        found = [key for key in given if key in names and key not in own]
        if found and lacking:
            raise RuntimeError(
                f"{_C.rank_prefix()}load_state_dict: {len(found)} keys ('{found[0]}' for one) are "
                f"names from before '{prefix.removesuffix('.') or '(root)'}' was replaced by a "
                f"{type(root.get_submodule(prefix.removesuffix('.'))).__name__}, and a piece of "
                f"its state cannot be translated: there is nothing for '{lacking[0]}'. Load a "
                "model in several files by smp.resume_from_checkpoint(folder, partial=False), or "
                "give the whole state dict, or keys of model.state_dict()"
            )


def _shapes_of(own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict of whole meta tensors; a tensor with two names is made once."""
    made: dict[Tensor, Tensor] = {}
    for value in own.values():
        if isinstance(value, Tensor):
            shape = sharding.whole_shape(value)
            made.setdefault(value, torch.empty(shape, dtype=value.dtype, device="meta"))
    return {key: made[v] if isinstance(v, Tensor) else v for key, v in own.items()}


def _distributed(root: nn.Module) -> Iterator[str]:
    """Yields the prefixes of the outermost distributed modules."""
    outer: list[str] = []
    for name, module in root.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, DistributedModule) and not prefix.startswith(tuple(outer)):
            outer.append(prefix)
            yield prefix


def _endings(key: str) -> Iterator[str]:
    """Yields a name and its endings, as in files that leave out prefixes."""
    while "." in key:
        yield key
        key = key.partition(".")[2]
