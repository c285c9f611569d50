"""Gradients by name out of what each rank has of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def marked_gradients(model: Any) -> dict[str, Any]:
    """Returns this rank's part of each gradient after a step, with marks that identify parts."""
    from smp.precision.holdings import holding_of, master_of
    from smp.tensor_parallel import partial

    grads, named, flat = {}, [], {}
    for full_name, parameter in model.local_named_parameters():
        grad = master_of(parameter).grad
        if grad is None:
            continue
        name = full_name.removeprefix("module.")
        named.append((name, parameter))
        grads[name] = grad.detach().clone()
        holding = holding_of(parameter)
        if holding is not None:
            flat[name] = (holding.begin, holding.numel, tuple(holding.shape))
    return {**grads, **partial.marks_of(partial.slices_of(named), flat)}


def whole_gradients(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The gradients of the whole model.

    Args:
        of_ranks: results of :func:`marked_gradients` on ranks that hold one copy together.

    Raises:
        ValueError: a part of one is missing.
    """
    from smp.tensor_parallel import partial

    return partial.merge(of_ranks)


def has_parts(of_rank: Mapping[str, Any]) -> bool:
    """Returns whether :func:`marked_gradients` returned some parts of gradients."""
    from smp.tensor_parallel.partial import FLAT_MARK, SHARDS_MARK

    flat = of_rank.get(FLAT_MARK, {}).values()
    return bool(of_rank.get(SHARDS_MARK)) or any(n < math.prod(size) for _, n, size in flat)
