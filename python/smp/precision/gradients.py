"""Keeps the loss scale in gradients until their true values are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp.precision.holdings import parameters_of
from smp.precision.loss_scaler import LossScaler
from smp.world import comm, device_numbers
from smp.world.device_numbers import DeviceFlag, moved
from smp.world.rank import Rank

_GRADIENTS = "_smp_gradients"


@dataclass(frozen=True)
class ShownGradient:
    """A copy of a gradient, made when ``.grad`` of a 16-bit parameter was read.

    Attributes:
        name: name of the parameter.
        copy: gradient in the parameter's dtype, without loss scale; ``version`` is its first one.
        given: gradient that was copied; ``given_version`` is its version at that time.
        num_changes: number of changes of the divisor until then.
    """

    name: str
    copy: Tensor
    version: int
    given: Tensor
    given_version: int
    num_changes: int

    def is_of(self, given: Tensor, num_changes: int) -> bool:
        """Returns whether the copy is still up to date."""
        is_same = given is self.given or given.data_ptr() == self.given.data_ptr()
        return is_same and given._version == self.given_version and num_changes == self.num_changes

    def refuse_written(self) -> None:
        """Raises if the copy was written to, since updates do not read it."""
        if self.copy._version != self.version:
            raise RuntimeError(
                f"{_C.rank_prefix()}somebody wrote to .grad of '{self.name}', a copy in 16 bits of "
                "the gradient that is applied. Clip with optimizer.clip_master_grads or "
                "smp.clip_grad_norm_, assign to .grad, or write to .grad of the masters "
                "(optimizer.fp32_from_fp16_groups)"
            )


class ScaledGradients:
    """The gradients of one optimizer: their scale, and whether all of them are finite.

    A training step leaves gradients that are ``divisor`` times too large. Code that reads their
    values calls :meth:`unscale` first; fused optimizers divide while they update instead. When the
    step is over, all ranks of a replica decide together whether a gradient is infinite or NaN.
    All of that happens on the device; the host waits only when it reads ``overflow``.

    Args:
        rank: rank of this process.
        optimizer: optimizer of torch with the parameters of the gradients.
        scaler: source of the scale with which a backward begins.
        is_scaled: whether there is a loss scale, so that gradients have to be checked.
    """

    def __init__(
        self, rank: Rank, optimizer: torch.optim.Optimizer, scaler: LossScaler, *, is_scaled: bool
    ) -> None:
        self._rank = rank
        self._optimizer = optimizer
        self._scaler = scaler
        self._is_scaled = is_scaled
        #: Whether the present gradients have been checked for infinite and NaN values.
        self.is_checked = False
        #: Remaining divisor of the gradients; a float64 scalar tensor if only the device has its
        #: value.
        self.divisor: float | Tensor = 1.0
        #: Whether a gradient of the last backward was infinite or NaN on any rank.
        self.overflow = DeviceFlag()
        # An update was made with the present gradients, so their scale is unknown. `renewed` has
        # the parameters whose gradients were set since.
        self._are_applied = False
        self.renewed: set[Tensor] = set()
        #: Copies of gradients by the parameters of the model at which they were read.
        self.shown: dict[Tensor, ShownGradient] = {}
        self.num_changes = 0  # changes of the divisor

    def __reduce__(self) -> Any:
        return type(None), ()  # files that save a parameter do not have this object

    @property
    def marks(self) -> tuple[Any, ...]:
        """The scale of the present gradients, and what is known about them."""
        return self.is_checked, self.divisor, self.overflow.number, self._are_applied

    def restore_marks(self, marks: tuple[Any, ...]) -> None:
        """Restores `marks` together with the gradients."""
        self.is_checked, self.divisor, found, self._are_applied = marks
        self.overflow = DeviceFlag(found)

    def attach(self) -> None:
        """Attaches this object to the parameters of the optimizer."""
        for parameter in parameters_of(self._optimizer):
            setattr(parameter, _GRADIENTS, self)

    def step_done(self, has_reduced: bool) -> None:
        """Checks the gradients after a training step. Collective over the ranks that skip together.

        Args:
            has_reduced: whether the step has left new gradients on this rank.
        """
        self._are_applied = False
        if not self._is_scaled:
            return
        kind = "world" if self._rank.sizes["shard"] > 1 else "mp"
        if self._rank.sizes[kind] > 1:  # only hosts communicate here
            has_reduced = any(comm.allgather(has_reduced, comm.CommGroup(kind)))
        if has_reduced:
            self._check()

    def check(self) -> None:
        """Looks for an overflow unless a step has done so. Collective like `step_done`.

        Raises:
            RuntimeError: a copy of a gradient was written to, which has no effect.
        """
        for shown in self.shown.values():
            shown.refuse_written()
        if self._is_scaled and not self.is_checked:
            self._check()

    def used(self, are_applied: bool = False) -> None:
        """Notes that the gradients were applied or dropped; the next ones are new."""
        self.is_checked = False
        self.divisor = 1.0
        self.num_changes += 1
        self._are_applied = are_applied
        self.renewed.clear()
        self.shown.clear()

    def is_used(self, parameter: Tensor) -> bool:
        """Returns whether an update was made with the present gradient of a parameter."""
        return self._are_applied and parameter not in self.renewed

    @property
    def scale_now(self) -> float | Tensor:
        """Factor by which the gradients are too large, whether they are checked or not."""
        return self.divisor if self.is_checked or not self._is_scaled else self._scaler.factor

    def _divide_by(self, divisor: float | Tensor) -> None:
        self.divisor = divisor
        self.num_changes += 1

    def unscale(self) -> None:
        """Gives gradients their true values. Collective like `step_done`."""
        self.check()
        self.divide()

    def divide(self) -> None:
        """Gives gradients that `check` has checked their true values."""
        if isinstance(self.divisor, Tensor) or self.divisor != 1.0:
            scale(self._grads(), 1.0 / self.divisor)
            self._divide_by(1.0)

    def scaled_by(self, factor: Tensor) -> None:
        """Takes over a further factor, one number, by which other code has scaled the gradients."""
        divisor = self.divisor_tensor
        self._divide_by(divisor * moved(factor, divisor.device).reshape(()))

    def clip(self, divisor: Tensor) -> None:
        """Sets another divisor, unless the update is going to be skipped.

        Args:
            divisor: divisor of the present gradients; float64 scalar tensor.
        """
        found_inf = self.overflow.number
        if found_inf is not None:  # the norm of a skipped update may be infinite
            divisor = torch.where(found_inf != 0, self.divisor_tensor, divisor)
        self._divide_by(divisor)

    @property
    def divisor_tensor(self) -> Tensor:
        """The divisor as a number on the device."""
        if isinstance(self.divisor, Tensor):
            return self.divisor
        return device_numbers.number(self.divisor, self._rank.device)

    def _check(self) -> None:
        factor = self._scaler.factor
        self._divide_by(factor.clone() if isinstance(factor, Tensor) else factor)
        own = found_nonfinite(self._grads(), self._rank.device)
        kinds = device_numbers.skipping_kinds(self._rank)
        found = device_numbers.maxima(self._rank, own.reshape(1), kinds)
        self.overflow = DeviceFlag(found.reshape(()))
        self.is_checked = True

    def _grads(self) -> list[Tensor]:
        parameters = parameters_of(self._optimizer)
        return [p.grad for p in parameters if p.grad is not None and p.grad.numel()]


def gradients_of(parameter: Tensor) -> ScaledGradients | None:
    """Returns the keeper of the scale of a parameter's gradient; None if it has none."""
    found = getattr(parameter, _GRADIENTS, None)
    assert found is None or isinstance(found, ScaledGradients)
    return found


def found_nonfinite(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns 1 if an element is infinite or NaN, else 0; float64 scalar tensor on ``device``."""
    # Sums of squares in float64 of float32 cannot overflow.
    return sum_of_squares(grads, device).isfinite().logical_not().double()


def sum_of_squares(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the sum of squares of all elements; float64 scalar tensor on ``device``."""
    total = device_numbers.number(0.0, device)
    for group in by_device(grads).values():
        total = total + moved(torch.ops.smp.sum_of_squares(group), total.device)
    return total


def scale(grads: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiplies gradients in place."""
    for device, group in by_device(grads).items():
        own = factor if isinstance(factor, Tensor) else device_numbers.number(factor, device)
        torch.ops.smp.scale_(group, moved(own, device))


def by_device(grads: Sequence[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Returns the same tensors, grouped by device."""
    groups: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        groups.setdefault(grad.device, []).append(grad)
    return groups
