"""The steps of a rank: the running one, and counts of earlier ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from smp.world.rank import Rank


class Steps:
    """Calls of step functions on one rank.

    Attributes:
        num_begun: calls that began.
        num_finished: calls that returned.
        running: name of the step function that runs now.
        has_trained: whether a step has computed gradients.
        has_gradients: whether a step has done so since the last update of an optimizer.
        missed_at: line of the script that has read ``.grad`` where there is none, though there are
            gradients elsewhere that no update has used yet.
        samples: samples in the batch of the last step on this rank; 0: not known.
        dropout_seed: seed of masks that do not depend on the layout; None: no step has needed it.
        num_passes: additional evaluations by the check of the loss.
        num_scaled_backwards: running backward passes that began at a loss with its scale.
        has_faults: whether `SMP_FAULT` names places where steps misbehave.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.num_begun = self.num_finished = self.num_passes = 0
        self.running: str | None = None
        self.has_trained = self.has_gradients = False
        self.missed_at: str | None = None
        self.num_scaled_backwards = self.samples = 0
        self.dropout_seed: int | None = None
        self.has_faults = rank.settings.fault is not None

    def inject_fault(self, step: int, microbatch: int | None = None) -> None:
        """Misbehaves if `SMP_FAULT` names this place."""
        if self._rank.settings.fault is not None:
            self._rank.settings.fault.strike(self._rank.global_rank, step, microbatch)

    def begin(self, name: str) -> None:
        """Notes the name of a step function as the running one.

        Raises:
            RuntimeError: one is running already.
        """
        if self.running is not None:
            raise RuntimeError(
                f"{self._rank.prefix}step '{name}' was called inside step '{self.running}'; "
                "call step functions one after the other, and plain functions inside of them"
            )
        self.running = name

    def refuse_inside(self, what: str, place: str = "behind") -> None:
        """Raises a RuntimeError while a step function runs.

        Args:
            what: name of the call that the script makes.
            place: right place of the call: "behind" the step function or "in front of" it.
        """
        if self.running is not None:
            raise RuntimeError(
                f"{self._rank.prefix}{what} was called inside step '{self.running}'. A step "
                "function runs once per microbatch, and its gradients are whole when it has "
                f"returned: call {what} {place} the step function"
            )

    def refuse_missed(self) -> None:
        """Raises a RuntimeError if the script has looked for gradients in vain, and no update
        followed."""
        if self.missed_at is not None:
            raise RuntimeError(
                f"{self._rank.prefix}{self.missed_at} has read .grad of the model's parameters, "
                "which is None because each rank has gradients of the pieces that it updates, and "
                "no optimizer has updated parameters since: what the script computes from .grad "
                "itself (an update by hand, the first step of SAM) does nothing. Update with an "
                "optimizer in smp.DistributedOptimizer, or leave shard_optimizer_state and "
                "sharded_data_parallel_degree out"
            )

    @contextmanager
    def scaling_loss(self) -> Iterator[None]:
        """Marks the block as a backward that began with the loss scale."""
        self.num_scaled_backwards += 1  # a pipeline runs several at once
        try:
            yield
        finally:
            self.num_scaled_backwards -= 1
