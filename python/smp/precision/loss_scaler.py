"""Scales of the loss in fp16 training; equal on all ranks that share a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

import smp._C as _C

#: Keys of ``dynamic_loss_args``.
DYNAMIC_ARGUMENTS = (
    "init_scale",
    "scale_factor",
    "scale_window",
    "min_scale",
    "delayed_shift",
    "consecutive_hysteresis",
)


class LossScaler(Protocol):
    """The factor of a loss before its backward, and the rule of its changes."""

    @property
    def loss_scale(self) -> float:
        """The scale, read by the host."""

    @loss_scale.setter
    def loss_scale(self, value: float) -> None: ...

    @property
    def is_dynamic(self) -> bool: ...

    @property
    def factor(self) -> float | Tensor:
        """The scale as a number, or a dynamic one as a float64 scalar tensor on the device, to
        which the next update writes."""

    def update_scale(self, overflow: bool | Tensor) -> None:
        """Ends an iteration. Called once per optimizer step, also when that is skipped."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class StaticLossScaler:
    """A constant scale.

    Args:
        loss_scale: > 0.
    """

    is_dynamic = False

    def __init__(self, loss_scale: float = 1.0) -> None:
        self.loss_scale = _positive("static_loss_scale", loss_scale)

    @property
    def factor(self) -> float:
        """The scale."""
        return self.loss_scale

    def update_scale(self, overflow: bool | Tensor) -> None:
        """Changes nothing, since the scale is constant."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale."""
        return {"loss_scale": self.loss_scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Changes nothing: a static scale is an argument, and no state."""


class DynamicLossScaler:
    """Lowers the scale after overflows and raises it after iterations without any.

    Scale and counters live on the device, where an overflow is found. The host waits for the device
    when it reads them, and caches them until the next update.

    Source: DeepSpeed ``deepspeed/runtime/fp16/loss_scaler.py``, the classic rule.

    Args:
        init_scale: first scale.
        scale_factor: factor of each change of the scale, > 1.
        scale_window: iterations without overflow after which the scale is raised.
        min_scale: lower bound of the scale.
        delayed_shift: number of overflows until the scale is lowered; each one skips the step.
        consecutive_hysteresis: whether an iteration without overflow resets that count; else only
            raising the scale does.
        device: device on which the scale is kept.
    """

    is_dynamic = True

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        init_scale = _positive("init_scale", init_scale)
        self.scale_factor = _positive("scale_factor", scale_factor)
        self.scale_window = int(_positive("scale_window", scale_window))
        self.min_scale = _positive("min_scale", min_scale)
        self.delayed_shift = int(_positive("delayed_shift", delayed_shift))
        self.consecutive_hysteresis = bool(consecutive_hysteresis)
        if self.scale_factor <= 1.0:
            raise ValueError(
                f"{_C.rank_prefix()}loss scale argument scale_factor must be > 1, got "
                f"{scale_factor}; the default is 2"
            )
        # Scale, iteration, last overflow and hysteresis, in the order of `update_loss_scale_`.
        self._state = torch.empty(4, dtype=torch.float64, device=device)
        self._known: list[float] | None = None
        self._set(init_scale, 0, -1, self.delayed_shift)

    @property
    def loss_scale(self) -> float:
        """The scale. Waits for the device, and so do the counters."""
        return self._numbers()[0]

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._state[0].fill_(value)
        self._known = None

    @property
    def iteration(self) -> int:
        """Number of updates."""
        return int(self._numbers()[1])

    @property
    def last_overflow(self) -> int:
        """The last iteration with an overflow, or -1."""
        return int(self._numbers()[2])

    @property
    def hysteresis(self) -> int:
        """Number of overflows until the scale is lowered; the last one lowers it."""
        return int(self._numbers()[3])

    @property
    def factor(self) -> Tensor:
        """The scale on the device, read without waiting."""
        return self._state[0]

    def update_scale(self, overflow: bool | Tensor) -> None:
        """Ends an iteration, on the device.

        Args:
            overflow: whether some gradient was infinite or NaN on some rank: a bool, or a number on
                the device that is 0 if not.
        """
        if not isinstance(overflow, Tensor):
            overflow = torch.full((), float(overflow), device=self._state.device)
        torch.ops.smp.update_loss_scale_(
            self._state,
            overflow,
            self.scale_factor,
            self.scale_window,
            self.min_scale,
            self.delayed_shift,
            self.consecutive_hysteresis,
        )
        self._known = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale, and the counters that decide on its next change."""
        return {
            "loss_scale": self.loss_scale,
            "iteration": self.iteration,
            "last_overflow": self.last_overflow,
            "hysteresis": self.hysteresis,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over scale and counters; the state of a static scaler has only a scale."""
        self._set(
            float(state["loss_scale"]),
            int(state.get("iteration", 0)),
            int(state.get("last_overflow", -1)),
            int(state.get("hysteresis", self.delayed_shift)),
        )

    def take_over(self, other: DynamicLossScaler) -> None:
        """Takes over scale, counters and arguments of another scaler."""
        for name in DYNAMIC_ARGUMENTS:
            if name != "init_scale":
                setattr(self, name, getattr(other, name))
        self.load_state_dict(other.state_dict())

    def _numbers(self) -> list[float]:
        if self._known is None:
            self._known = [number.item() for number in self._state.cpu()]
        return self._known

    def _set(self, *numbers: float) -> None:
        self._state.copy_(torch.tensor(numbers, dtype=torch.float64))
        self._known = None


def make_loss_scaler(
    static_loss_scale: float | None,
    dynamic: bool,
    arguments: Mapping[str, Any],
    device: torch.device | str = "cpu",
) -> LossScaler:
    """Makes the scaler for arguments of `DistributedOptimizer`.

    Args:
        static_loss_scale: constant scale, used unless ``dynamic``; None means 1.
        dynamic: whether the scale changes.
        arguments: arguments of the dynamic scaler.
        device: device on which a dynamic scale is kept.

    Raises:
        ValueError: a name is unknown, or a value is out of range.
    """
    unknown = sorted(arguments.keys() - set(DYNAMIC_ARGUMENTS))
    if unknown:
        raise ValueError(
            f"{_C.rank_prefix()}unknown loss scale arguments {unknown}; the known ones are "
            f"{', '.join(DYNAMIC_ARGUMENTS)}"
        )
    if dynamic:
        return DynamicLossScaler(**arguments, device=device)
    return StaticLossScaler(1.0 if static_loss_scale is None else static_loss_scale)


def _positive(name: str, value: float) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(
            f"{_C.rank_prefix()}loss scale argument {name} must be a finite number > 0, got "
            f"{value!r}"
        )
    return float(value)
