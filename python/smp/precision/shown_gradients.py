"""``.grad`` of a model's parameters whose gradients belong to their masters.

Gradients are summed and kept in float32, as ``.grad`` of masters, and carry a loss scale. Scripts
look for them at the parameters of the model. There a copy is made when it is read, so it costs
neither memory nor time in other steps. If a rank has pieces, there is nothing to show, and the
first read is logged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp.precision.gradients import ShownGradient, gradients_of
from smp.precision.holdings import Holding, holding_of
from smp.precision.script_writes import ScriptParameter
from smp.world.log import first_rank_log
from smp.world.steps import Steps

_native: Any = torch.Tensor.grad


def show_gradients(holdings: Iterable[Holding]) -> None:
    """Gives parameters a ``.grad`` that is made from that of their masters, which are whole."""
    for holding in holdings:
        # UninitializedParameter of torch does the same; code that has the parameter keeps it.
        holding.parameter.__class__ = HalfParameter


def miss_gradients(holdings: Iterable[Holding]) -> None:
    """Makes parameters log that they have no ``.grad``, since ranks update pieces instead."""
    for holding in holdings:
        holding.parameter.__class__ = CutParameter


class CutParameter(ScriptParameter):
    """A parameter of which this rank updates a piece, or nothing.

    ``grad`` is None. Rank 0 logs the first read if a gradient is elsewhere, because code
    for all parameters skips those without a gradient, and would do nothing.

    Attributes:
        steps: steps of the run, which note the line of a script that reads ``grad``.
    """

    steps: Steps | None = None

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The gradient of this object: None, except while autograd leaves one here."""
        own: Tensor | None = _native.__get__(self)
        holding = holding_of(self)
        has_other = own is None and holding is not None and holding.master.grad is not None
        if has_other and CutParameter.steps is not None:
            _note_missed(CutParameter.steps, sys._getframe(1))
        if has_other and first_rank_log.is_new(CutParameter):
            first_rank_log.warning(
                "smp: .grad of the model's parameters is None, because each rank has gradients of "
                "the pieces that it updates: they are at the parameters of optimizer.param_groups. "
                "smp.clip_grad_norm_ and torch.nn.utils.clip_grad_norm_ know them"
            )
        return own

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and (holding := holding_of(self)) is not None:
            raise RuntimeError(
                f"{_C.rank_prefix()}.grad of '{holding.name}' was assigned, but this rank updates "
                f"{holding.numel} of its {self.numel()} elements, whose gradient is at the "
                "parameters of optimizer.param_groups: what is assigned here would reach nobody"
            )
        _native.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class HalfParameter(ScriptParameter):
    """A parameter in 16-bit training, whose gradient is that of its master.

    ``grad`` is a rounded copy without loss scale, and None between an update and new gradients.
    Setting it sets the gradient of the master. A write to a copy would have no effect, so it is an
    error in the next update.
    """

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The gradient that will be applied, in the dtype of the parameter."""
        holding = holding_of(self)
        if holding is None:  # this is a copy of a parameter
            own: Tensor | None = _native.__get__(self)
            return own
        given = holding.master.grad
        gradients = gradients_of(holding.master)
        if gradients is None:
            return None if given is None else given.to(self.dtype)
        if given is None or gradients.is_used(self):
            gradients.shown.pop(self, None)
            return None
        known = gradients.shown.get(self)
        if known is not None:
            if known.is_of(given, gradients.num_changes):
                return known.copy
            known.refuse_written()
        copy = (given / gradients.scale_now).to(self.dtype)
        gradients.shown[self] = ShownGradient(
            holding.name, copy, copy._version, given, given._version, gradients.num_changes
        )
        return copy

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        holding = holding_of(self)
        if holding is None:
            _native.__set__(self, value)
            return
        gradients = gradients_of(holding.master)
        if gradients is not None:
            gradients.shown.pop(self, None)
            gradients.renewed.add(self)
        if value is not None:
            if value.shape != self.shape:
                raise RuntimeError(
                    f"{_C.rank_prefix()}the gradient of '{holding.name}' has shape "
                    f"{tuple(self.shape)}, got {tuple(value.shape)}"
                )
            scale = 1.0 if gradients is None else gradients.scale_now
            value = (value.detach().to(holding.master) * scale).to(holding.master.dtype)
        holding.master.grad = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def _note_missed(steps: Steps, frame: FrameType) -> None:
    """Notes the line of a script that reads no gradient although a step has computed some."""
    room = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if room not in ("torch", "smp") and steps.has_gradients and steps.running is None:
        steps.missed_at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
