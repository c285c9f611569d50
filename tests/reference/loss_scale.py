"""The dynamic loss scale, written down as a function of the whole history."""

from __future__ import annotations

from collections.abc import Sequence


def scale_trace(
    overflows: Sequence[bool],
    init_scale: float = 2.0**32,
    scale_factor: float = 2.0,
    scale_window: int = 1000,
    min_scale: float = 1.0,
    delayed_shift: int = 1,
    consecutive_hysteresis: bool = False,
) -> list[float]:
    """Returns the scales after each iteration.

    They follow from the overflows, without the counters of an implementation. The scale falls at an
    overflow when the overflows borne since credit was given last have used it up. It rises
    ``scale_window``, twice that, ... iterations after the first clean iteration that follows the
    last overflow. The start counts as an overflow.

    Args:
        overflows: whether each iteration overflowed.
    """
    scales: list[float] = []
    scale = init_scale
    restored_at = 0  # overflows before this iteration are forgiven
    for now, overflow in enumerate(overflows):
        past = [i for i in range(now) if overflows[i]]
        if overflow:
            borne = sum(1 for i in past if i >= restored_at)
            if borne >= delayed_shift - 1:
                scale = max(scale / scale_factor, min_scale)
        else:
            last = past[-1] if past else -1
            run = now - last - 1
            if consecutive_hysteresis:
                restored_at = now
            if run > 0 and run % scale_window == 0:
                restored_at = now
                scale *= scale_factor
        scales.append(scale)
    return scales
