"""Cuts a chain of parts into stages, and finds the contents of ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import torch

from smp.planning.profile import ModelProfile, Part, Shares


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
    profile: ModelProfile,
    num_ranks: int,
    chunks: int,
    weight: Callable[[Part], float],
    speeds: Sequence[float] = (),
) -> list[Stage]:
    """Cuts the chain such that the heaviest stage is as light as can be.

    Args:
        profile: the chain; a tail becomes a last stage on rank 0.
        num_ranks: pipeline ranks.
        chunks: stages of each rank.
        weight: function that returns the weight of a part.
        speeds: speed of each pipeline rank; empty: all are alike.

    Raises:
        ValueError: there are fewer parts than stages.
    """
    parts = profile.parts
    num_stages = num_ranks * chunks
    if len(parts) < num_stages:
        raise ValueError(f"{len(parts)} parts cannot be {num_stages} stages")
    tail = weight(profile.tail) if profile.tail is not None else 0.0
    by_stage = [1.0] * num_stages if not speeds else list(speeds) * chunks
    ends = _ends([weight(part) for part in parts], by_stage, tail)
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


def _ends(weights: Sequence[float], speeds: Sequence[float], tail: float) -> list[int]:
    """Returns the ends of stages whose largest load is as small as can be, early stages filled.

    Dynamic programming over where a stage begins. A load is weight by speed; the weight of the
    tail counts for the first stage.
    """
    upto = torch.tensor([0.0, *itertools.accumulate(weights)], dtype=torch.float64)
    # Row: where a stage begins; column: where it ends. Stages are not empty.
    is_empty = torch.ones(len(upto), len(upto)).tril() > 0
    weight = (upto[None] - upto[:, None]).masked_fill(is_empty, inf)
    behind = [torch.full_like(upto, inf)]  # least of the largest load of later stages, by begin
    behind[0][-1] = 0.0
    for stage in reversed(range(len(speeds))):
        load = (weight + (tail if stage == 0 else 0.0)) / speeds[stage]
        behind.append(torch.maximum(load, behind[-1]).amin(1))
    behind.reverse()
    most, begin, ends = float(behind[0][0]) * (1 + 1e-9), 0, []
    for stage, speed in enumerate(speeds):
        load = (weight[begin] + (tail if stage == 0 else 0.0)) / speed
        begin = int(torch.nonzero((load <= most) & (behind[stage + 1] <= most))[-1])
        ends.append(begin)
    return ends


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
