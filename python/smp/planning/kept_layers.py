"""Chooses layers that keep their activations where other layers are computed again.

Each pipeline rank keeps what its room allows. Early ranks have more microbatches in flight, so they
compute more layers again than late ones. That such choices belong to a layer and a stage is the
point of Galvatron (Miao et al., PVLDB 16, 2022), which also varies the sharding by layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache

from smp.planning.layout import Layout
from smp.planning.profile import Part
from smp.planning.stages import Stage, of_parts


def marked(stages: Sequence[Stage], names: Collection[str], num_ranks: int) -> list[Stage]:
    """Returns stages in which the layers with these names keep their activations.

    Args:
        stages: stages in the order of the chain.
        names: names of layers.
        num_ranks: pipeline ranks.
    """
    if not names:
        return list(stages)

    @cache
    def mark(part: Part) -> Part:
        return replace(part, is_kept=True) if part.is_layer and part.name in names else part

    cuts = [([mark(one) for one in own.parts], own.input_bytes, own.calls) for own in stages]
    return of_parts(cuts, num_ranks)


def most_kept(
    stages: Sequence[Stage],
    layers: Collection[str],
    layout: Layout,
    filled: Callable[[Sequence[Stage]], list[float]],
) -> tuple[str, ...]:
    """Returns the names of as many layers as ranks have room for, in the order of the chain.

    A rank keeps those layers first that take the most time for the bytes that they keep. Layers
    that are cut between stages are computed again.

    Args:
        stages: stages in the order of the chain, all of whose layers are computed again.
        layers: names of the model's layers.
        layout: layout of the run.
        filled: function that returns, for stages, the peak over the room of each pipeline rank.
    """

    def fit(choices: Sequence[Sequence[Part]]) -> list[bool]:
        names = {part.name for own in choices for part in own}
        return [share <= 1 for share in filled(marked(stages, names, layout.pp))]

    ordered = _by_rank(stages, layers, layout)
    kept = _longest_begins(ordered, fit)
    # Smaller layers may have room behind a layer that has none.
    later = [
        _first_of_each_kind(own[len(begin) :]) for own, begin in zip(ordered, kept, strict=True)
    ]
    for step in itertools.zip_longest(*later):
        more = [own + [part] * (part is not None) for own, part in zip(kept, step, strict=True)]
        pairs = zip(fit(more), kept, more, strict=True)
        kept = [new if has_room else old for has_room, old, new in pairs]
    names = {part.name for own in kept for part in own}
    return tuple(part.name for own in stages for part in own.parts if part.name in names)


def _longest_begins(
    ordered: Sequence[list[Part]], fit: Callable[[Sequence[Sequence[Part]]], list[bool]]
) -> list[list[Part]]:
    """Returns as many first layers of each rank as fit, by bisection on all ranks at once."""
    least, most = [0] * len(ordered), [len(own) for own in ordered]
    while least != most:
        middle = [(low + high + 1) // 2 for low, high in zip(least, most, strict=True)]
        begins = [own[:number] for own, number in zip(ordered, middle, strict=True)]
        for rank, has_room in enumerate(fit(begins)):
            if has_room:
                least[rank] = middle[rank]
            else:
                most[rank] = middle[rank] - 1
    return [own[:number] for own, number in zip(ordered, least, strict=True)]


def _first_of_each_kind(parts: Sequence[Part]) -> list[Part]:
    return list({part.costs: part for part in reversed(parts)}.values())[::-1]


def _by_rank(stages: Sequence[Stage], layers: Collection[str], layout: Layout) -> list[list[Part]]:
    """Returns each rank's whole layers; the first ones gain most."""
    names = [part.name for own in stages for part in own.parts]
    found: list[list[Part]] = [[] for _ in range(layout.pp)]
    for own in stages:
        found[own.rank] += [
            part
            for part in own.parts
            if part.name in layers and not any(name.startswith(f"{part.name}.") for name in names)
        ]

    def gain(part: Part) -> float:
        num_bytes = part.kept.on(layout.shares) - part.input_bytes * layout.shares.whole
        seconds = part.forward.on(layout.shares)
        return seconds / num_bytes if num_bytes > 0 else float("inf")

    return [sorted(own, key=gain, reverse=True) for own in found]
