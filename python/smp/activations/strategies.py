"""Which layers of a sequence make one checkpoint. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

VALID = "'each', 'contiguous', 'group_<N>' (as in 'group_2') or 'budget:<GiB>' (as in 'budget:8')"


@dataclass(frozen=True)
class Strategy:
    """What a strategy string says.

    Attributes:
        kind: "groups" or "budget".
        group_size: most layers of one checkpoint; None: as many as are together.
        budget_bytes: of activations on each rank, with kind "budget".
    """

    kind: Literal["groups", "budget"]
    group_size: int | None = 1
    budget_bytes: int = 0


def parse_strategy(text: object) -> Strategy:
    """Reads a strategy.

    Raises:
        ValueError: it is none; the text lists those that there are.
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
        places: where each layer lives; None: a layer that is not in one place.
        group_size: most layers of one checkpoint; None: no limit.

    Returns:
        ranges of layers that cover all of them in order, and whether each is a checkpoint; layers
        without one place are alone and are none.
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
