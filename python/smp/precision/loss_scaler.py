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
    """What a loss is multiplied with before its backward, and how that changes."""

    @property
    def loss_scale(self) -> float:
        """The scale, read by the host."""

    @loss_scale.setter
    def loss_scale(self, value: float) -> None: ...

    @property
    def is_dynamic(self) -> bool: ...

    @property
    def factor(self) -> float | Tensor:
        """The scale where it is known: a dynamic one on the device, as a float64 tensor without
        dimensions that the next update writes to."""

    def update_scale(self, overflow: bool | Tensor) -> None:
        """To be called once per optimizer step, also when that is skipped."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class StaticLossScaler:
    """One scale for the whole run.

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
        """Without effect."""

    def state_dict(self) -> dict[str, Any]:
        """The scale."""
        return {"loss_scale": self.loss_scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Without effect: a static scale is an argument, not a state."""


class DynamicLossScaler:
    """Lowers the scale after overflows and raises it after iterations without any.

    Scale and counters live on the device, where an overflow is found. The host waits for it when
    somebody reads them here, and then knows them until the next update.

    Source: DeepSpeed ``deepspeed/runtime/fp16/loss_scaler.py``, the classic rule.

    Args:
        init_scale: at the beginning.
        scale_factor: by which the scale changes, > 1.
        scale_window: iterations without overflow after which it is raised.
        min_scale: not lowered below this.
        delayed_shift: overflows that are borne before it is lowered; the step is skipped at each.
        consecutive_hysteresis: an iteration without overflow gives all of these back, else only
            raising the scale does.
        device: where the scale is kept.
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
        # Scale, iteration, last overflow, hysteresis, as `update_loss_scale_` has them.
        self._state = torch.empty(4, dtype=torch.float64, device=device)
        self._known: list[float] | None = None
        self._set(init_scale, 0, -1, self.delayed_shift)

    @property
    def loss_scale(self) -> float:
        """The scale. Waits for the device, as the counters do."""
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
        """Overflows that are borne yet, and the one that lowers the scale."""
        return int(self._numbers()[3])

    @property
    def factor(self) -> Tensor:
        """The scale on the device, which nobody waits for."""
        return self._state[0]

    def update_scale(self, overflow: bool | Tensor) -> None:
        """Ends an iteration, on the device.

        Args:
            overflow: some gradient of it was infinite or NaN on some rank; a number on the device
                that is not 0 then, or a bool.
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
        """The scale and what decides on its next change."""
        return {
            "loss_scale": self.loss_scale,
            "iteration": self.iteration,
            "last_overflow": self.last_overflow,
            "hysteresis": self.hysteresis,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over scale and counters; of a static scaler's state the scale alone."""
        self._set(
            float(state["loss_scale"]),
            int(state.get("iteration", 0)),
            int(state.get("last_overflow", -1)),
            int(state.get("hysteresis", self.delayed_shift)),
        )

    def take_over(self, other: DynamicLossScaler) -> None:
        """Goes on as another one would: with its scale, its counters and its arguments."""
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
    """The scaler that arguments of `DistributedOptimizer` ask for.

    Args:
        static_loss_scale: counts unless ``dynamic``; None means 1.
        dynamic: the scale changes.
        arguments: of the dynamic scaler.
        device: where a dynamic scale is kept.

    Raises:
        ValueError: for unknown names and for values out of range.
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
