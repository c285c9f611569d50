"""Small samples of a product of choices in which every few choices meet. Pure.

Most faults need two or three choices to come together, not seven: Kuhn, Wallace, Gallo, "Software
fault interactions and implications for software testing" (2004). The sample is made greedily, as
AETG does it (Cohen, Dalal, Fredman, Patton 1997), but over all rows, which are few here.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Sequence

Row = tuple[Hashable, ...]
#: Values of some columns: ``((column, value), ...)`` with columns in order.
Combination = tuple[tuple[int, Hashable], ...]


def combinations_of(row: Row, strength: int) -> frozenset[Combination]:
    """Every choice of ``strength`` columns of a row, with its values there."""
    return frozenset(itertools.combinations(enumerate(row), strength))


def covering_sample(rows: Sequence[Row], strength: int, seed: int) -> list[Row]:
    """Chooses a few rows that show each combination of ``strength`` values that any row shows.

    Args:
        rows: all allowed rows, each with one value per column.
        strength: number of columns in a combination.
        seed: decides between rows that add equally many combinations.
    """
    order = list(rows)
    random.Random(seed).shuffle(order)
    shown_by = {row: combinations_of(row, strength) for row in order}
    missing = set().union(*shown_by.values())
    sample = []
    while missing:
        best = max(order, key=lambda row: len(shown_by[row] & missing))
        sample.append(best)
        missing -= shown_by[best]
    return sample
