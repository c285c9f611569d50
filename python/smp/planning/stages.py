"""Cuts a chain of parts into stages, and estimates what each rank holds of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from smp.partition.decide import kept_by
from smp.planning.layout import Layout
from smp.planning.memory import Holding, Passing, RankBytes, Sharding, rank_bytes
from smp.planning.profile import ModelProfile, Part
from smp.planning.tensor_split import Shares

_ROUNDS = 40  # rounds of a bisection
_MOST_LEAVING = 2  # copies to the host under way, see docs/design/memory.md


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
        split, whole = self._elements
        return split * shares.split_state + whole

    @cached_property
    def _elements(self) -> tuple[int, int]:
        return sum(p.split_elements for p in self.parts), sum(p.whole_elements for p in self.parts)


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
    kind_of = _kinds_of(parts)
    stages = []
    begin = 0
    for idx, end in enumerate(ends):
        own = parts[begin:end]
        stages.append(_stage(idx % num_ranks, own, kind_of, _input(parts, begin)))
        begin = end
    if profile.tail is not None:
        tail_kind = ((profile.tail, 1),)
        stages.append(Stage(0, (profile.tail,), tail_kind, _input(parts, len(parts))))
    return stages


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
    kind_of = _kinds_of([part for parts, _, _ in parts_of for part in parts])
    return [
        _stage(idx % num_ranks, parts, kind_of, num_bytes, calls)
        for idx, (parts, num_bytes, calls) in enumerate(parts_of)
    ]


def _kinds_of(parts: Sequence[Part]) -> dict[Part, Part]:
    """Maps each part to the first part with the same costs."""
    first_of: dict[tuple[object, ...], Part] = {}
    return {part: first_of.setdefault(part.costs, part) for part in parts}


def _stage(
    rank: int,
    parts: Sequence[Part],
    kind_of: Mapping[Part, Part],
    input_bytes: float,
    calls: float = 0.0,
) -> Stage:
    kinds = tuple(Counter(kind_of[part] for part in parts).items())
    return Stage(rank, tuple(parts), kinds, input_bytes, calls)


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


@dataclass(frozen=True)
class Terms:
    """Choices of a run that decide how much of its content a rank holds.

    Attributes:
        shares: shares that a rank has of a tensor-parallel group's microbatch.
        kept: microbatches whose activations each pipeline rank keeps.
        microbatches: number of microbatches of a step.
        sharding: sharding of parameters and state.
        samples: samples of a microbatch, as parts count them.
        checkpoints: each repeated layer is computed again.
        offload: inputs of checkpoints are copied to host memory.
        horizon: inputs of checkpoints that are back on the device before they are needed.
        spreads_experts: experts are spread over the ranks of a tensor-parallel group.
    """

    shares: Shares
    kept: Sequence[int]
    microbatches: int
    sharding: Sharding
    samples: int = 1
    checkpoints: bool = False
    offload: bool = False
    horizon: int = 4
    spreads_experts: bool = False

    @classmethod
    def of(cls, layout: Layout, half: bool, bucket_bytes: int) -> Terms:
        """Returns the terms of a layout.

        Args:
            layout: layout of the run.
            half: parameters have 16 bits.
            bucket_bytes: bytes of gradients that are reduced together.
        """
        return cls(
            layout.shares,
            _kept(layout.schedule, layout.pp, layout.chunks, layout.microbatches, layout.active),
            layout.microbatches,
            layout.sharding(half, bucket_bytes),
            layout.microbatch,
            layout.checkpoints,
            layout.offload,
            spreads_experts=layout.spreads_experts,
        )


@cache
def _kept(policy: str, pp: int, chunks: int, microbatches: int, active: int) -> tuple[int, ...]:
    return tuple(kept_by(policy, pp, chunks, microbatches, active))


def held_by_rank(contents: Sequence[Content], terms: Terms) -> list[RankBytes]:
    """Returns what each pipeline rank holds at its peak."""
    held: dict[int, RankBytes] = {}
    for content in contents:
        known: dict[int, RankBytes] = {}
        for rank in content.ranks:
            kept = terms.kept[rank]
            if kept not in known:
                known[kept] = _rank_bytes(content, terms, kept)
            held[rank] = known[kept]
    return [held[rank] for rank in sorted(held)]


def peak_bytes(contents: Sequence[Content], terms: Terms) -> float:
    """Returns the peak of the fullest rank."""
    return max(
        _rank_bytes(content, terms, max(terms.kept[rank] for rank in content.ranks)).peak
        for content in contents
    )


def _rank_bytes(content: Content, terms: Terms, kept: int) -> RankBytes:
    holding = holding_of(content, terms, kept)
    return rank_bytes(holding, terms.sharding, terms.microbatches)


def holding_of(content: Content, terms: Terms, kept: int) -> Holding:
    """Returns what a rank computes with.

    Args:
        content: content of the rank.
        terms: choices of the run.
        kept: number of microbatches whose activations the rank keeps.
    """
    shares, sharding = terms.shares, terms.sharding
    elements = frozen = small = largest = wide = all_kept = again = tensor = largest_input = (
        tied
    ) = 0.0
    units: list[float] = []
    layers = 0
    parts = [(part, count, kept) for part, count in content.kinds]
    # The activations of a tail are freed at once, as on the last rank.
    parts += [(part, 1, terms.kept[-1]) for part in content.tail]
    for part, count, times in parts:
        unit = 0.0
        for numel, is_split, is_wide in part.tensors:
            own = numel * (shares.split_state if is_split else 1.0)
            elements += count * own
            wide += count * own * is_wide
            largest = max(largest, own)
            if own < sharding.persistent:
                small += count * own
            else:
                unit += own
        frozen += count * (part.frozen_split * shares.split_state + part.frozen_whole)
        units += [unit] * min(count, 2)
        activations = part.split_kept * shares.split + part.whole_kept * shares.whole
        if terms.spreads_experts:
            activations -= part.routed_kept * (shares.whole - shares.split)
        if terms.checkpoints and part.is_layer:
            again = max(again, activations)
            activations = min(activations, part.input_bytes * shares.whole)
            largest_input = max(largest_input, activations)
            layers += count
        all_kept += times * count * activations
        tensor = max(tensor, part.largest_bytes * shares.split)
        tied += part.tied_elements * shares.split_state
    samples, width = terms.samples, sharding.parameter_bytes
    activations = samples * all_kept
    host = 0.0
    if terms.offload:
        inputs = kept * samples * layers * largest_input
        near = min(inputs, (_MOST_LEAVING + terms.horizon) * samples * largest_input)
        host = inputs - near
        activations = max(near, activations - host)
    passing = Passing(samples * tensor, width * largest, width * tied, samples * again)
    return Holding(
        elements=elements,
        trainable=elements - frozen,
        small=small,
        largest=largest,
        units=sum(sorted(units, reverse=True)[:2]),
        wide=wide,
        activations=activations,
        temporary=passing.forward_ends(kept),
        late=passing.backward_ends,
        host=host,
    )
