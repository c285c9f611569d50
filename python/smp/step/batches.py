"""The batch of one step: this rank's, or of several data-parallel ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import smp._C as _C
from smp.step import microbatch
from smp.world import runtime


@dataclass(frozen=True)
class Batch:
    """The arguments of one call.

    Attributes:
        args, kwargs: as the script gave them.
        arguments: those to cut, by name.
        count: microbatches that they make.
        weights: of the microbatches; None if all are 1.
        num_samples: of the call; 0 where dummies have no batch dimension.
        part: number of the batch, where this process reads several; None: it reads one.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arguments: dict[str, Any]
    count: int
    weights: Sequence[float] | None
    num_samples: int
    part: int | None = None

    @classmethod
    def of(
        cls,
        current: runtime.Runtime,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        arguments: dict[str, Any],
        axes: Mapping[str, int],
        trains: bool,
        part: int | None = None,
    ) -> Batch:
        """Counts the microbatches of a call."""
        count = microbatch.num_microbatches(arguments, axes, current.rank.config.microbatches)
        # Arguments of other ranks than the driver may be dummies of any shape.
        weights = None
        if current.rank.ranks["pp"] == 0:
            sizes = microbatch.batch_sizes(arguments, axes)
            weights = microbatch.weights(sizes, count, strict=trains)
        num_samples = microbatch.num_samples(arguments, axes)
        return cls(*call, arguments, count, weights, num_samples, part)


def joined_weights(batches: Sequence[Batch]) -> Sequence[float] | None:
    """Weights of the microbatches of several batches, which count alike; 1 on average."""
    counts = [batch.count for batch in batches]
    if len(set(counts)) == 1 and all(batch.weights is None for batch in batches):
        return None
    share = sum(counts) / len(batches)
    return [
        weight * share / batch.count
        for batch in batches
        for weight in batch.weights or [1.0] * batch.count
    ]


class Bodies(Protocol):
    """Runs a step function for one microbatch after the other."""

    results: dict[int, Any]

    def __call__(self, mb: int) -> None: ...
    def weights(self) -> list[float] | None: ...


class BodiesOfRanks:
    """The microbatches of several data-parallel ranks in one process, one rank after the other.

    Random numbers are those of each rank: see `StepRun.run`.

    Args:
        current: the runtime.
        parts: of each rank, with the number of its microbatches.
        seed: of this process.
    """

    def __init__(
        self, current: runtime.Runtime, parts: Sequence[tuple[Bodies, int]], seed: int
    ) -> None:
        self._current = current
        self._parts = [bodies for bodies, _ in parts]
        self._places = [(d, mb) for d, (_, count) in enumerate(parts) for mb in range(count)]
        self._seed = seed
        self.results: dict[int, Any] = {}

    def __call__(self, mb: int) -> None:
        dp_rank, own = self._places[mb]
        seed = self._seed
        for part in (dp_rank, self._current.steps.num_begun, own):
            seed = _C.mix_seed(seed, part)
        _C.seed_generators(seed, str(self._current.rank.device))
        self._parts[dp_rank](own)
        self.results[mb] = self._parts[dp_rank].results.pop(own)

    def weights(self) -> list[float] | None:
        parts = [(bodies.weights(), bodies) for bodies in self._parts]
        if all(weights is None for weights, _ in parts):
            return None
        counts = [sum(d == rank for d, _ in self._places) for rank in range(len(parts))]
        return [
            weight
            for (weights, _), count in zip(parts, counts, strict=True)
            for weight in weights or [1.0] * count
        ]


MakeBodies = Callable[[Batch, int, Sequence[float] | None], Bodies]


def make_bodies(
    current: runtime.Runtime,
    batches: Sequence[Batch],
    count: int,
    weights: Sequence[float] | None,
    seed: int,
    make: MakeBodies,
) -> Bodies:
    """The bodies of a step.

    Args:
        current: the runtime.
        batches: one, or of several data-parallel ranks in this process.
        count: microbatches of all, of the driver.
        weights: of them; None if all are 1.
        seed: of this process, before the step.
        make: makes those of one batch.
    """
    if len(batches) == 1:
        return make(batches[0], count, weights)
    parts, begin = [], 0
    for batch in batches:
        end = begin + batch.count
        own = None if weights is None else weights[begin:end]
        parts.append((make(batch, batch.count, own), batch.count))
        begin = end
    return BodiesOfRanks(current, parts, seed)
