"""Gradients that carry a loss scale until somebody needs their true values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smp import comm, runtime
from smp.precision.loss_scaler import LossScaler
from smp.precision.masters import parameters_of

_GRADIENTS = "_smp_gradients"


class ScaledGradients:
    """The gradients of one optimizer: their scale, and whether all of them are finite.

    A training step leaves gradients that are ``divisor`` times too large. Whoever reads their
    values calls :meth:`unscale` first; fused optimizers divide while they update instead. Whether a
    gradient is infinite or NaN all ranks of a replica find out together, when the step is over.

    Args:
        optimizer: of torch, whose parameters they belong to.
        scaler: has the scale that backward works with.
        is_scaled: False if there is no loss scale, hence nothing to find out.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scaler: LossScaler, *, is_scaled: bool
    ) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._is_scaled = is_scaled
        self._is_checked = False
        #: What the gradients are still to be divided by.
        self.divisor = 1.0
        #: Was a gradient of the last backward infinite or NaN on any rank?
        self.overflow = False

    def __reduce__(self) -> Any:
        return type(None), ()  # who saves a parameter does not mean this

    def attach(self) -> None:
        """Makes the parameters know who keeps the scale of their gradients."""
        for parameter in parameters_of(self._optimizer):
            setattr(parameter, _GRADIENTS, self)

    def step_done(self, has_reduced: bool) -> None:
        """A step that trains is over. Collective over the ranks that skip together.

        Args:
            has_reduced: it has left new gradients on this rank.
        """
        if self._is_scaled:
            self._check(has_reduced)

    def check(self) -> None:
        """Finds out about overflow unless a step has done so. Collective as `step_done`."""
        if self._is_scaled and not self._is_checked:
            self._check(True)

    def used(self) -> None:
        """The gradients have been applied or thrown away; the next ones are new."""
        self._is_checked = False
        self.divisor = 1.0

    def unscale(self) -> None:
        """Gives gradients their true values. Collective as `step_done`."""
        self.check()
        if self.divisor != 1.0:
            scale(self._grads(), 1.0 / self.divisor)
            self.divisor = 1.0

    def _check(self, has_new: bool) -> None:
        grads = self._grads()
        answers = [(has_new, all_finite(grads))]
        if runtime.current().sizes["shard"] > 1:
            answers = comm.allgather(answers[0], comm.WORLD)
        elif comm.mp_size() > 1:
            answers = comm.allgather(answers[0], comm.MP_GROUP)
        if any(new for new, _ in answers):
            self.divisor = self._scaler.loss_scale
            self.overflow = not all(finite for _, finite in answers)
            self._is_checked = True

    def _grads(self) -> list[Tensor]:
        parameters = parameters_of(self._optimizer)
        return [p.grad for p in parameters if p.grad is not None and p.grad.numel()]


def gradients_of(parameter: Tensor) -> ScaledGradients | None:
    """Who keeps the scale of a parameter's gradient; None if it has none."""
    found = getattr(parameter, _GRADIENTS, None)
    assert found is None or isinstance(found, ScaledGradients)
    return found


def all_finite(grads: Sequence[Tensor]) -> bool:
    """Is every element a number? Sums of squares in float64 of float32 cannot overflow."""
    total = sum(float(torch.ops.smp.sum_of_squares(group)) for group in by_device(grads).values())
    return math.isfinite(total)


def scale(grads: Sequence[Tensor], factor: float) -> None:
    """Multiplies in place."""
    for device, group in by_device(grads).items():
        torch.ops.smp.scale_(group, torch.tensor(factor, dtype=torch.float64, device=device))


def by_device(grads: Sequence[Tensor]) -> dict[torch.device, list[Tensor]]:
    """The same tensors, those of a device together."""
    groups: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        groups.setdefault(grad.device, []).append(grad)
    return groups
