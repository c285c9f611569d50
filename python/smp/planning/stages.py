"""Cuts a chain of parts into stages, and finds the contents of ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from smp.planning.profile import ModelProfile, Part, Shares

_ROUNDS = 40  # rounds of a bisection


@dataclass(frozen=True)
class Stage:
    """Neighbouring parts that one rank runs.

    Attributes:
        rank: pipeline rank.
        parts: parts in the order of the chain.
        kinds: parts that differ in more than their names, and how often each occurs; the same
            object represents a kind in all stages.
        input_bytes: bytes of one sample that come from the stage before.
        calls: calls of its modules by code of other ranks, per microbatch.
    """

    rank: int
    parts: tuple[Part, ...]
    kinds: tuple[tuple[Part, int], ...]
    input_bytes: float
    calls: float = 0.0

    def elements(self, shares: Shares) -> float:
        """Returns the number of parameter elements that a rank computes with."""
        return sum(count * part.elements_on(shares) for part, count in self.kinds)


def cut(
    profile: ModelProfile, num_ranks: int, chunks: int, weight: Callable[[Part], float]
) -> list[Stage]:
    """Cuts the chain such that the heaviest stage is as light as can be.

    Args:
        profile: the chain; a tail becomes a last stage on rank 0.
        num_ranks: pipeline ranks.
        chunks: stages of each rank.
        weight: function that returns the weight of a part.

    Raises:
        ValueError: there are fewer parts than stages.
    """
    parts = profile.parts
    num_stages = num_ranks * chunks
    if len(parts) < num_stages:
        raise ValueError(f"{len(parts)} parts cannot be {num_stages} stages")
    weights = [weight(part) for part in parts]
    tail = weight(profile.tail) if profile.tail is not None else 0.0
    low, high = max(weights), (sum(weights) + tail) * (1 + 1e-9)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if _ends(weights, num_stages, middle, tail) is None:
            low = middle
        else:
            high = middle
    ends = _ends(weights, num_stages, high, tail)
    assert ends is not None, "everything fits into what everything weighs"
    begins = [0, *ends]
    cuts = [(parts[a:b], _input(parts, a), 0.0) for a, b in itertools.pairwise(begins)]
    if profile.tail is not None:
        cuts.append(((profile.tail,), _input(parts, len(parts)), 0.0))
    return of_parts(cuts, num_ranks)


def of_parts(
    parts_of: Sequence[tuple[Sequence[Part], float, float]], num_ranks: int
) -> list[Stage]:
    """Returns stages of parts that are cut already.

    A stage beyond the full rounds over all ranks is a tail on rank 0.

    Args:
        parts_of: parts of each stage, bytes of one sample that come into it, and calls by code of
            other ranks.
        num_ranks: pipeline ranks.
    """
    first_of: dict[object, Part] = {}  # the first part with the same costs represents the others

    def stage(idx: int, parts: Sequence[Part], num_bytes: float, calls: float) -> Stage:
        kinds = Counter(first_of.setdefault(part.costs, part) for part in parts)
        return Stage(idx % num_ranks, tuple(parts), tuple(kinds.items()), num_bytes, calls)

    return [stage(idx, *own) for idx, own in enumerate(parts_of)]


def _ends(weights: Sequence[float], num_stages: int, most: float, tail: float) -> list[int] | None:
    """Returns ends of stages of which none weighs more than `most`, or None if there are none.

    The weight of the tail counts for the first stage.
    """
    ends: list[int] = []
    begin = 0
    for stage in range(num_stages):
        left = num_stages - stage - 1  # stages that still have to get a part
        load = weights[begin] + (tail if stage == 0 else 0.0)
        if load > most and stage > 0:
            return None
        end = begin + 1
        while end < len(weights) - left and load + weights[end] <= most:
            load += weights[end]
            end += 1
        ends.append(end)
        begin = end
    return ends if begin == len(weights) else None


def _input(parts: Sequence[Part], begin: int) -> float:
    """Returns the bytes that cross in front of a part.

    These are the bytes that the next layer takes, or else those that the last one has given.
    """
    if begin == 0:
        return 0.0
    for part in (*parts[begin:], *reversed(parts[:begin])):
        if part.is_layer:
            return part.input_bytes
    return parts[begin - 1].largest_bytes


@dataclass(frozen=True)
class Content:
    """Parts that one or several pipeline ranks hold.

    Attributes:
        kinds: parts and how often each occurs, as in `Stage.kinds`, without a tail.
        tail: parts of a tail.
        ranks: pipeline ranks with this content, ascending.
    """

    kinds: tuple[tuple[Part, int], ...]
    tail: tuple[Part, ...]
    ranks: tuple[int, ...]


def contents_of(stages: Sequence[Stage], num_ranks: int, chunks: int) -> list[Content]:
    """Returns the different contents of pipeline ranks.

    Args:
        stages: stages of a cut, in the order of the chain.
        num_ranks: pipeline ranks.
        chunks: stages of each rank; later stages are a tail.
    """
    by_rank: list[Counter[Part]] = [Counter() for _ in range(num_ranks)]
    tails: list[tuple[Part, ...]] = [()] * num_ranks
    for idx, stage in enumerate(stages):
        if idx >= num_ranks * chunks:
            tails[stage.rank] += stage.parts
        else:
            by_rank[stage.rank].update(dict(stage.kinds))
    ranks: dict[object, list[int]] = {}
    for rank, kinds in enumerate(by_rank):
        ranks.setdefault((frozenset(kinds.items()), tails[rank]), []).append(rank)
    return [
        Content(tuple(by_rank[alike[0]].items()), tails[alike[0]], tuple(alike))
        for alike in ranks.values()
    ]
