"""Buffers that some releases of transformers keep in state dicts and the distributed modules lack.

The causal masks, the value of masked scores and the rotary frequencies follow from the
configuration. A translator has no configuration, so families are noted when one of their models is
replaced; buffers with unknown values are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smp.nn.huggingface import installed

_MASKED = {"gpt2": -1e4, "gptj": -1e9, "gpt_neo": -1e9, "gpt_neox": -1e9}
# Buffers of the releases that kept masks, for a process without transformers.
_USUAL = {
    "gpt2": {"attn.bias": torch.uint8, "attn.masked_bias": torch.float32},
    "gptj": {"attn.bias": torch.uint8, "attn.masked_bias": torch.float32},
    "gpt_neo": {"attn.attention.masked_bias": torch.float32},
    "gpt_neox": {"attention.bias": torch.bool, "attention.masked_bias": torch.float32},
}


@dataclass(frozen=True)
class Facts:
    """The values beside its parameters that determine a model's buffers.

    Attributes:
        num_positions: side of the causal masks.
        windows: number of positions that each layer sees, or None for all earlier ones.
        rotary_dim: channels of a head that are rotated.
        rotary_base: base of the frequencies.
    """

    num_positions: int
    windows: tuple[int | None, ...]
    rotary_dim: int | None = None
    rotary_base: float = 10000.0


_Key = tuple[str, int, int, int]
_facts: dict[_Key, Facts] = {}


def note(family: str, table: tuple[int, int], facts: Facts) -> None:
    """Stores the facts of a model that is being replaced.

    The keys are its family, the shape of its word table and its number of layers.
    """
    _facts[(family, table[0], table[1], len(facts.windows))] = facts


def add_to_layers(
    family: str,
    layers: str,
    numbers: Sequence[int],
    result: dict[str, Any],
    max_seq_len: int | None,
) -> None:
    """Adds the buffers of layers that the installed release wants to a dict of its names.

    Args:
        family: name of the family, as in ``config.model_type``.
        layers: prefix of the list of layers.
        numbers: numbers of the layers.
        result: state dict that already holds the model's other entries.
        max_seq_len: side of causal masks, or None if unknown.
    """
    wanted: Mapping[str, torch.dtype] = installed.layer_buffers(family)
    if max_seq_len is not None and not installed.is_known():
        wanted = _USUAL.get(family, {})
    if not wanted:
        return
    root = layers.rpartition(".")[0].rpartition(".")[0]
    # Layers that were not replaced have their buffers already.
    known = {key.removeprefix(layers).split(".")[0] for key in result if key.startswith(layers)}
    facts = _facts_of(family, root + "." if root else "", len(known), result)
    size = max_seq_len or _num_positions(root, result) or (facts and facts.num_positions) or None
    masks: dict[int | None, Tensor] = {}
    for number in numbers:
        for name, dtype in wanted.items():
            value = _value(family, name, dtype, number, size, facts, masks)
            if value is not None:
                result.setdefault(f"{layers}{number}.{name}", value)


def _value(
    family: str,
    name: str,
    dtype: torch.dtype,
    number: int,
    size: int | None,
    facts: Facts | None,
    masks: dict[int | None, Tensor],
) -> Tensor | None:
    """Returns one buffer, or None if its value is not known."""
    if name.endswith("masked_bias"):
        return torch.tensor(_MASKED[family], dtype=dtype)
    if name.endswith("inv_freq"):
        return None if facts is None else _frequencies(facts, dtype)
    if not name.endswith(".bias") or size is None or (facts is None and family == "gpt_neo"):
        return None
    window = None if facts is None else facts.windows[number]
    if window not in masks:
        masks[window] = _causal(size, window).to(dtype)
    return masks[window]


def _causal(size: int, window: int | None) -> Tensor:
    seen = torch.ones(size, size, dtype=torch.bool).tril()
    if window is not None:
        seen ^= seen.tril(-window)
    return seen.view(1, 1, size, size)


def _frequencies(facts: Facts, dtype: torch.dtype) -> Tensor | None:
    if facts.rotary_dim is None:
        return None
    exponents = torch.arange(0, facts.rotary_dim, 2).float() / facts.rotary_dim
    return (1.0 / facts.rotary_base**exponents).to(dtype)


def _facts_of(family: str, root: str, num_layers: int, result: Mapping[str, Any]) -> Facts | None:
    for name in ("wte", "embed_in", "embed_tokens"):
        table = result.get(f"{root}{name}.weight")
        if isinstance(table, Tensor) and table.dim() == 2:
            return _facts.get((family, table.shape[0], table.shape[1], num_layers))
    return None


def _num_positions(root: str, result: Mapping[str, Any]) -> int | None:
    table = result.get(f"{root}.wpe.weight" if root else "wpe.weight")
    return table.shape[0] if isinstance(table, Tensor) else None


def add_positions(family: str, stack: str, result: dict[str, Any], max_seq_len: int | None) -> None:
    """Puts ``position_ids`` of an encoder's embeddings into a dict, or takes them out.

    Args:
        family: name of the family, as in ``config.model_type``.
        stack: prefix of the encoder.
        result: state dict that already holds the model's other entries.
        max_seq_len: number of positions, or None if unknown.
    """
    embeddings = stack.removesuffix("encoder.") + "embeddings."
    key = f"{embeddings}position_ids"
    table = result.get(f"{embeddings}position_embeddings.weight")
    if installed.is_known() and not installed.stores_positions(family):
        result.pop(key, None)
        return
    wanted = installed.is_known() or max_seq_len is not None
    if wanted and isinstance(table, Tensor):
        size = max_seq_len or table.shape[0]
        result.setdefault(key, torch.arange(size).expand(1, -1))
