"""Rotary embeddings as configurations describe them, in all releases of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smp.nn.huggingface.fields import field
from smp.tensor_parallel.registry import Unsupported


@dataclass(frozen=True)
class Rotary:
    """A rotation of the halves of the first channels of each head.

    Attributes:
        dim: number of the rotated channels.
        base: base of the frequencies.
    """

    dim: int
    base: float


def rotary_of(config: Any) -> Rotary:
    """Returns the rotation from the fields of any release.

    Raises:
        Unsupported: frequencies are scaled, or the number of rotated channels is odd.
    """
    head_size = config.hidden_size // config.num_attention_heads
    parameters = field(config, "rope_parameters", None)
    if parameters is None:
        share, base = _of_older(config)
    else:
        _check_type("rope_parameters", parameters)
        share = parameters.get("partial_rotary_factor", 1.0)
        base = parameters["rope_theta"]
    dim = int(head_size * share)
    if dim % 2 == 1:
        raise Unsupported(
            f"{dim} of {head_size} channels of a head are rotated; supported are even numbers"
        )
    return Rotary(dim, float(base))


def _of_older(config: Any) -> tuple[float, float]:
    """Returns the share of rotated channels and the base by the fields of releases before 5."""
    scaling = field(config, "rope_scaling", None)
    if scaling is not None:
        _check_type("rope_scaling", scaling)
    base = field(config, "rotary_emb_base", None) or field(config, "rope_theta", None)
    return field(config, "rotary_pct", 1.0), 10000.0 if base is None else base


def _check_type(name: str, parameters: Mapping[str, Any]) -> None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise Unsupported(f"{name} is {dict(parameters)!r}; supported is rope_type 'default'")
