"""Scales of the loss in fp16 training: pure bookkeeping, equal on all ranks that share a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from smp import _C

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

    loss_scale: float

    @property
    def is_dynamic(self) -> bool: ...

    def update_scale(self, overflow: bool) -> None:
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

    def update_scale(self, overflow: bool) -> None:
        """Without effect."""

    def state_dict(self) -> dict[str, Any]:
        """The scale."""
        return {"loss_scale": self.loss_scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Without effect: a static scale is an argument, not a state."""


class DynamicLossScaler:
    """Lowers the scale after overflows and raises it after iterations without any.

    Source: DeepSpeed ``deepspeed/runtime/fp16/loss_scaler.py``, the classic rule.

    Args:
        init_scale: at the beginning.
        scale_factor: by which the scale changes, > 1.
        scale_window: iterations without overflow after which it is raised.
        min_scale: not lowered below this.
        delayed_shift: overflows that are borne before it is lowered; the step is skipped at each.
        consecutive_hysteresis: an iteration without overflow gives all of these back, else only
            raising the scale does.
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
    ) -> None:
        self.loss_scale = _positive("init_scale", init_scale)
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
        self.iteration = 0
        self.last_overflow = -1
        self.hysteresis = self.delayed_shift

    def update_scale(self, overflow: bool) -> None:
        """Ends an iteration.

        Args:
            overflow: some gradient of it was infinite or NaN on some rank.
        """
        if overflow:
            if self.hysteresis <= 1:
                self.loss_scale = max(self.loss_scale / self.scale_factor, self.min_scale)
            else:
                self.hysteresis -= 1
            self.last_overflow = self.iteration
        else:
            if self.consecutive_hysteresis:
                self.hysteresis = self.delayed_shift
            num_clean = self.iteration - self.last_overflow - 1
            if num_clean > 0 and num_clean % self.scale_window == 0:
                self.hysteresis = self.delayed_shift
                self.loss_scale *= self.scale_factor
        self.iteration += 1

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
        self.loss_scale = float(state["loss_scale"])
        self.iteration = int(state.get("iteration", 0))
        self.last_overflow = int(state.get("last_overflow", -1))
        self.hysteresis = int(state.get("hysteresis", self.delayed_shift))


def make_loss_scaler(
    static_loss_scale: float | None, dynamic: bool, arguments: Mapping[str, Any]
) -> LossScaler:
    """The scaler that arguments of `DistributedOptimizer` ask for.

    Args:
        static_loss_scale: counts unless ``dynamic``; None means 1.
        dynamic: the scale changes.
        arguments: of the dynamic scaler.

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
        return DynamicLossScaler(**arguments)
    return StaticLossScaler(1.0 if static_loss_scale is None else static_loss_scale)


def _positive(name: str, value: float) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(
            f"{_C.rank_prefix()}loss scale argument {name} must be a finite number > 0, got "
            f"{value!r}"
        )
    return float(value)
