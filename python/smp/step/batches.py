"""The batch of one step: that of this rank, or of several data-parallel ranks in one process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import smp._C as _C
from smp.step.cutting import Cutting
from smp.world import runtime


class MicrobatchArguments:
    """The arguments of a step function, cut into microbatches.

    Args:
        bound: the arguments as the script gave them.
        pieces: pieces of the arguments that are cut, by name.
    """

    def __init__(self, bound: inspect.BoundArguments, pieces: Mapping[str, Sequence[Any]]) -> None:
        self._bound = bound
        self._pieces = pieces

    def of(self, mb: int) -> inspect.BoundArguments:
        """Returns the arguments of one microbatch."""
        own = inspect.BoundArguments(self._bound.signature, self._bound.arguments.copy())
        for name, value in self._bound.arguments.items():
            kind = self._bound.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                own.arguments[name] = {k: self._piece(k, v, mb) for k, v in value.items()}
            else:
                own.arguments[name] = self._piece(name, value, mb)
        return own

    def _piece(self, name: str, value: Any, mb: int) -> Any:
        return self._pieces[name][mb] if name in self._pieces else value


@dataclass(frozen=True)
class Batch:
    """The arguments of one call.

    Attributes:
        bound: arguments as the script gave them.
        cutting: readings of the arguments.
        count: number of microbatches.
        part: number of the batch if this process reads several; None: it reads one.
    """

    bound: inspect.BoundArguments
    cutting: Cutting
    count: int
    part: int | None = None

    @classmethod
    def of(
        cls,
        current: runtime.Runtime,
        bound: inspect.BoundArguments,
        cutting: Cutting,
        part: int | None = None,
    ) -> Batch:
        """Makes the batch of a call, and counts its microbatches."""
        return cls(bound, cutting, cutting.count(current.rank.config.microbatches), part)

    @property
    def num_samples(self) -> int:
        """Number of samples of the call; 0 if dummies have no batch dimension."""
        return self.cutting.num_samples

    def pieces(self, count: int) -> MicrobatchArguments:
        """Cuts the arguments into ``count`` microbatches."""
        return MicrobatchArguments(self.bound, self.cutting.pieces(count))

    def samples_by_microbatch(self) -> list[float]:
        """Returns how many samples each microbatch has; 1 each if nothing has samples."""
        return self.cutting.samples_by_microbatch(self.count)


class MicrobatchRunner(Protocol):
    """Runs a step function for one microbatch after the other."""

    results: dict[int, Any]

    def __call__(self, mb: int) -> None: ...
    def output_weights(self) -> list[float] | None: ...


class BodiesOfRanks:
    """The microbatches of several data-parallel ranks in one process, one rank after the other.

    Random numbers are those of each rank; see `StepRun.run`.

    Args:
        current: the runtime.
        parts: bodies of each rank, and the number of its microbatches.
        seed: seed of this process.
    """

    def __init__(
        self, current: runtime.Runtime, parts: Sequence[tuple[MicrobatchRunner, int]], seed: int
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

    def output_weights(self) -> list[float] | None:
        parts = [bodies.output_weights() for bodies in self._parts]
        if all(weights is None for weights in parts):
            return None
        counts = [sum(d == rank for d, _ in self._places) for rank in range(len(parts))]
        return [
            weight
            for weights, count in zip(parts, counts, strict=True)
            for weight in weights or [1.0] * count
        ]


@dataclass(frozen=True)
class TrainedStep:
    """A step that has trained, for observers that run its function again.

    Attributes:
        engines: engines of the partitioned models.
        name: name of the step function.
        function: function of the user.
        batch: arguments of the step.
        rule: rule that weighs microbatches.
        make: makes the bodies of a pass over a batch.
    """

    engines: Sequence[Any]
    name: str
    function: Callable[..., Any]
    batch: Batch
    rule: Any
    make: Callable[[Batch], MicrobatchRunner]


MakeBodies = Callable[[Batch, int, int], MicrobatchRunner]


def make_bodies(
    current: runtime.Runtime,
    batches: Sequence[Batch],
    count: int,
    seed: int,
    make: MakeBodies,
) -> MicrobatchRunner:
    """Makes the bodies of a step.

    Args:
        current: the runtime.
        batches: the batch, or those of several data-parallel ranks in this process.
        count: number of microbatches of the driver, in all batches.
        seed: seed of this process, before the step.
        make: makes the bodies of one batch, from the number of its microbatches and the number of
            the first one.
    """
    if len(batches) == 1:
        return make(batches[0], count, 0)
    parts, begin = [], 0
    for batch in batches:
        parts.append((make(batch, batch.count, begin), batch.count))
        begin += batch.count
    return BodiesOfRanks(current, parts, seed)
