"""Runs a step function for one microbatch after the other."""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

import smp._C as _C
from smp.data_parallel import BatchWeights
from smp.dropout import places
from smp.model.share import Share, set_share
from smp.modules.late import LateTensor
from smp.pipeline import begin_context
from smp.step.batches import Batch
from smp.step.differentiation import explain_derivative
from smp.world import runtime
from smp.world.attached import Dropout


class MicrobatchRunner(Protocol):
    """Runs the microbatches of a step by their numbers.

    Attributes:
        results: return value of the step function, by microbatch.
        weights: weight of each microbatch's outputs in their mean.
    """

    results: list[Any]
    weights: list[float]

    def __call__(self, mb: int) -> None: ...


class Bodies:
    """Runs the microbatches of one batch, in the calling thread.

    Args:
        current: the runtime.
        function: function of the user.
        batch: arguments of the step function.
        count: number of microbatches.
        weights: weights of all microbatches of this rank; None: the first pipeline rank has them.
        first_mb: number of the first microbatch among these.
        draws: draws masks that do not depend on the layout, or None.
    """

    def __init__(
        self,
        current: runtime.Runtime,
        function: Callable[..., Any],
        batch: Batch,
        count: int,
        weights: BatchWeights | None = None,
        first_mb: int = 0,
        draws: Dropout | None = None,
    ) -> None:
        self._current = current
        self._function = function
        self._part = batch.part
        self._pieces = batch.pieces(count)
        self._share_of = weights, first_mb
        self._draws = draws
        self._context = contextvars.copy_context()
        self.results: list[Any] = [None] * count
        self.weights = [1.0] * count

    def __call__(self, mb: int) -> None:
        weights, first_mb = self._share_of
        share = Share(weights, first_mb + mb)
        try:
            own = self._pieces.of(mb)
            self.results[mb] = self._context.copy().run(self._run, mb, share, own)
            self.weights[mb] = share.weight
        finally:
            share.outputs.clear()  # the graph may keep the context of its forward

    def _run(self, mb: int, share: Share, own: inspect.BoundArguments) -> Any:
        """Runs the function in a copy of the context, which all of this affects alone."""
        steps = self._current.steps
        if steps.has_faults:
            steps.inject_fault(steps.num_begun - 1, mb)
        set_share(share)
        begin_context({})
        if self._draws is not None:
            places.enter(self._draws.body(mb, part=self._part))
        try:
            result = self._function(*own.args, **own.kwargs)
            # Ranks of a group gather together what only one of them may read later.
            return tree_map_only(LateTensor, LateTensor.read, result)
        except (RuntimeError, ValueError) as error:
            explain_derivative(self._current, error)
            raise


class BodiesOfRanks:
    """The microbatches of several data-parallel ranks in one process, one rank after the other.

    Random numbers are those of each rank; see `StepRun.run`.

    Args:
        current: the runtime.
        parts: bodies of each rank.
    """

    def __init__(self, current: runtime.Runtime, parts: Sequence[MicrobatchRunner]) -> None:
        self._current = current
        self._parts = parts
        self._places = [(d, mb) for d, part in enumerate(parts) for mb in range(len(part.results))]
        self._seed = torch.initial_seed() & (2**64 - 1)
        self.results: list[Any] = [None] * len(self._places)
        self.weights = [1.0] * len(self._places)

    def __call__(self, mb: int) -> None:
        dp_rank, own = self._places[mb]
        seed = self._seed
        for part in (dp_rank, self._current.steps.num_begun, own):
            seed = _C.mix_seed(seed, part)
        _C.seed_generators(seed, str(self._current.rank.device))
        bodies = self._parts[dp_rank]
        bodies(own)
        self.results[mb], self.weights[mb] = bodies.results[own], bodies.weights[own]
