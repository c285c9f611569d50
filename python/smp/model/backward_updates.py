"""Updates of parameters while the backward still runs (docs/design/optimizer_bytes.md)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

import smp._C as _C
from smp.modules.watching import unwatched
from smp.precision.holdings import master_of, parameters_of
from smp.world.rank import Rank


class Updates(Protocol):
    """Updates by one optimizer."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of torch."""

    def update_now(self) -> None:
        """Updates the parameters that have a gradient."""


class BackwardUpdates:
    """Applies the gradients of one model bucket by bucket, as soon as each of them was summed.

    The gradients of a bucket exist while its optimizers run, and are dropped afterwards. So a
    script cannot read them, and every backward is followed by ``optimizer.step()``.

    Args:
        rank: rank of this process.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._users: list[weakref.ref[Updates]] = []
        self._trainable: Sequence[tuple[str, nn.Parameter]] = ()
        self._are_covered = False
        self._applied: set[tuple[str, int]] = set()  # buckets since the last `confirm`
        self._in_step = self._is_torn = False

    def lay_out(self, trainable: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Takes over names and parameters that get gradients."""
        self._trainable, self._are_covered = trainable, False

    def use(self, updates: Updates) -> None:
        """Lets an optimizer update its parameters, in place of an earlier wrapper of it."""
        users = ((ref, ref()) for ref in self._users)
        self._users = [
            ref for ref, user in users if user and user.optimizer is not updates.optimizer
        ]
        self._users.append(weakref.ref(updates))
        self._are_covered = False

    def apply(self, kind: str, bucket_idx: int) -> None:
        """Updates the parameters that have a gradient, which are those of a bucket.

        Raises:
            RuntimeError: the bucket was applied before, and no update of an optimizer followed.
        """
        if (kind, bucket_idx) in self._applied:
            raise self._not_confirmed()
        self._applied.add((kind, bucket_idx))
        with unwatched():
            for ref in self._users:
                user = ref()
                if user is not None:
                    user.update_now()

    def confirm(self) -> None:
        """Notes that the script has asked for the update."""
        self._applied.clear()

    def begin_step(self) -> None:
        """Raises unless each gradient of a training step will have an optimizer that uses it up.

        Raises:
            RuntimeError: no update of an optimizer has followed the last step; an earlier step
                has failed in the middle of its updates; no optimizer has a parameter.
        """
        if self._is_torn:
            raise RuntimeError(
                f"{_C.rank_prefix()}an earlier step failed when a part of its updates was made, so "
                "parameters belong to different steps; start again from the last checkpoint"
            )
        if self._applied:
            raise self._not_confirmed()
        if not self._are_covered:
            self._check_covered()
        self._in_step = True

    def end_step(self) -> None:
        """Ends a step that was complete."""
        self._in_step = False

    def abandon_step(self) -> None:
        """Ends a step that has failed."""
        self._is_torn |= self._in_step and bool(self._applied)
        self._in_step = False
        self._applied.clear()

    def _check_covered(self) -> None:
        users = [user for ref in self._users if (user := ref())]
        updated = {id(p) for user in users for p in parameters_of(user.optimizer)}
        for name, parameter in self._trainable:
            if id(master_of(parameter)) not in updated:
                raise RuntimeError(
                    f"{_C.rank_prefix()}update_in_backward: no optimizer would use the gradient of "
                    f"'{name}' before it is dropped; wrap an optimizer with all trainable "
                    "parameters in smp.DistributedOptimizer before the first training step, or "
                    "freeze the parameter (requires_grad_(False))"
                )
        self._are_covered = True

    def _not_confirmed(self) -> RuntimeError:
        return RuntimeError(
            f"{_C.rank_prefix()}update_in_backward: a second backward began without "
            "optimizer.step() after the first one, whose gradients were applied already; gradients "
            "cannot be added up over steps: call optimizer.step() after each step, or set "
            "update_in_backward=False"
        )
