"""Groups the layers of a sequence into checkpoints. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

VALID = "'each', 'contiguous', 'group_<N>' (as in 'group_2') or 'budget:<GiB>' (as in 'budget:8')"


@dataclass(frozen=True)
class Strategy:
    """A parsed strategy string.

    Attributes:
        kind: "groups" or "budget".
        group_size: most layers of one checkpoint; None: as many as are on one partition.
        budget_bytes: memory for activations on each rank, with kind "budget".
    """

    kind: Literal["groups", "budget"]
    group_size: int | None = 1
    budget_bytes: int = 0


def parse_strategy(text: object) -> Strategy:
    """Parses a strategy string.

    Raises:
        ValueError: the strategy is unknown; the text lists the valid ones.
    """
    if text == "each":
        return Strategy("groups", 1)
    if text == "contiguous":
        return Strategy("groups", None)
    if isinstance(text, str):
        if found := re.fullmatch(r"group_([1-9]\d*)", text):
            return Strategy("groups", int(found[1]))
        if found := re.fullmatch(r"budget:(\d+(?:\.\d*)?|\.\d+)", text):
            gib = float(found[1])
            if math.isfinite(gib):
                return Strategy("budget", budget_bytes=int(gib * 2**30))
    raise ValueError(f"checkpointing strategy {text!r} is not known; use {VALID}")


def plan_groups(
    places: Sequence[Hashable | None], group_size: int | None
) -> list[tuple[range, bool]]:
    """Cuts layers into checkpoints: neighbours of one place, up to a number.

    Args:
        places: place of each layer; None: the layer is not in one place.
        group_size: most layers of one checkpoint; None: no limit.

    Returns:
        ranges that cover all layers in order, and whether each range is a checkpoint; a layer
        without one place is alone in its range and no checkpoint.
    """
    groups: list[tuple[range, bool]] = []
    begin = 0
    for idx in range(1, len(places) + 1):
        is_full = group_size is not None and idx - begin >= group_size
        if (
            idx < len(places)
            and places[idx] is not None
            and places[idx] == places[begin]
            and not is_full
        ):
            continue
        groups.append((range(begin, idx), places[begin] is not None))
        begin = idx
    return groups
