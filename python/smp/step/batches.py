"""The batch of one step: that of this rank, or of several data-parallel ranks in one process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smp.step.cutting import Cutting


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
        pieces = self._pieces
        for name, value in self._bound.arguments.items():
            kind = self._bound.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                named = {k: pieces[k][mb] if k in pieces else v for k, v in value.items()}
                own.arguments[name] = named
            elif name in pieces:
                own.arguments[name] = pieces[name][mb]
        return own


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

    @property
    def num_samples(self) -> int:
        """Number of samples of the call; 0 if dummies have no batch dimension."""
        return self.cutting.num_samples

    def pieces(self, count: int) -> MicrobatchArguments:
        """Cuts the arguments into ``count`` microbatches."""
        return MicrobatchArguments(self.bound, self.cutting.pieces(count))


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
    make: Callable[[Batch], Callable[[int], None]]
