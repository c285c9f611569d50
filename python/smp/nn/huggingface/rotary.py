"""Rotary embeddings as configurations describe them, over the releases of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smp.tensor_parallel.registry import Unsupported


@dataclass(frozen=True)
class Rotary:
    """Attributes:
    dim: channels of each head that are rotated.
    base: of the frequencies.
    """

    dim: int
    base: float


def rotary_of(config: Any) -> Rotary:
    """Rotation of the halves of the first channels of a head.

    Raises:
        Unsupported: frequencies are scaled.
    """
    head_size = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:
        return _of_older(config, head_size)
    _check_type("rope_parameters", parameters)
    share = parameters.get("partial_rotary_factor", 1.0)
    return Rotary(int(head_size * share), float(parameters["rope_theta"]))


def _of_older(config: Any, head_size: int) -> Rotary:
    """Fields of releases before 5."""
    scaling = getattr(config, "rope_scaling", None)
    if scaling is not None:
        _check_type("rope_scaling", scaling)
    share = getattr(config, "rotary_pct", None)
    base = getattr(config, "rotary_emb_base", None) or getattr(config, "rope_theta", None)
    return Rotary(int(head_size * (1.0 if share is None else share)), float(base or 10000.0))


def _check_type(field: str, parameters: Mapping[str, Any]) -> None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default" or "rope_theta" not in parameters and field == "rope_parameters":
        raise Unsupported(f"{field} is {dict(parameters)!r}; supported is rope_type 'default'")
