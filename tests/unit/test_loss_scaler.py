"""Loss scales: the rule on scripted and on random histories."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp.precision import DynamicLossScaler, StaticLossScaler, make_loss_scaler
from tests.reference.loss_scale import scale_trace


def trace(scaler: Any, overflows: list[bool]) -> list[float]:
    scales = []
    for overflow in overflows:
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    return scales


def parse(history: str) -> list[bool]:
    """``x`` is an overflow, ``.`` is none."""
    return [letter == "x" for letter in history]


@pytest.mark.parametrize(
    ("history", "arguments", "expected"),
    [
        ("xx.", {"init_scale": 8}, [4, 2, 2]),
        ("xxxx", {"init_scale": 4, "min_scale": 2}, [2, 2, 2, 2]),
        # The first clean iteration after an overflow begins the window.
        ("x...x", {"init_scale": 8, "scale_window": 2}, [4, 4, 4, 8, 4]),
        (".....", {"init_scale": 1, "scale_window": 2}, [1, 1, 2, 2, 4]),
        ("xxxx", {"init_scale": 16, "delayed_shift": 3}, [16, 16, 8, 4]),
        # Overflows that were borne stay counted until the scale is raised, ...
        ("x.x.x", {"init_scale": 16, "delayed_shift": 2}, [16, 16, 8, 8, 4]),
        # ... or a clean iteration gives it back.
        (
            "x.x.xx",
            {"init_scale": 16, "delayed_shift": 2, "consecutive_hysteresis": True},
            [16, 16, 16, 16, 16, 8],
        ),
        (
            "xx..xx",
            {"init_scale": 16, "delayed_shift": 2, "scale_window": 1, "scale_factor": 4},
            [16, 4, 4, 16, 16, 4],
        ),
    ],
)
def test_scripted_histories(history: str, arguments: dict[str, Any], expected: list[float]) -> None:
    assert trace(DynamicLossScaler(**arguments), parse(history)) == expected
    assert scale_trace(parse(history), **arguments) == expected


@given(
    overflows=st.lists(st.booleans(), max_size=60),
    scale_window=st.integers(1, 6),
    delayed_shift=st.integers(1, 4),
    consecutive_hysteresis=st.booleans(),
    exponent=st.integers(0, 6),
    cut=st.integers(0, 60),
)
@settings(max_examples=150, deadline=None)
def test_random_histories_follow_the_rule_also_over_a_checkpoint(
    overflows: list[bool], cut: int, exponent: int, **arguments: Any
) -> None:
    arguments |= {"init_scale": 2.0**exponent}
    expected = scale_trace(overflows, **arguments)
    first = DynamicLossScaler(**arguments)
    begun = trace(first, overflows[:cut])
    second = DynamicLossScaler(**{**arguments, "init_scale": 3.0})
    second.load_state_dict(first.state_dict())
    assert begun + trace(second, overflows[cut:]) == expected


def test_defaults_are_the_documented_ones() -> None:
    scaler = DynamicLossScaler()
    assert scaler.loss_scale == 2.0**32
    assert trace(scaler, [True] * 20)[-1] == 2.0**12
    assert trace(scaler, [False] * 1001) == [2.0**12] * 1000 + [2.0**13]
    scaler = DynamicLossScaler(init_scale=2.0)
    assert trace(scaler, [True] * 3) == [1.0] * 3


def test_a_static_scale_stays() -> None:
    scaler = StaticLossScaler(1024.0)
    assert trace(scaler, [True, False] * 3) == [1024.0] * 6
    scaler.load_state_dict({"loss_scale": 2.0})
    assert scaler.loss_scale == 1024.0 and not scaler.is_dynamic


def test_arguments_choose_the_scaler() -> None:
    assert make_loss_scaler(None, False, {}).loss_scale == 1.0
    assert make_loss_scaler(128.0, False, {"init_scale": 4}).loss_scale == 128.0
    assert make_loss_scaler(128.0, True, {"init_scale": 4}).loss_scale == 4.0
    with pytest.raises(ValueError, match="scale_windw"):
        make_loss_scaler(1.0, True, {"scale_windw": 1})
    bad = [{"init_scale": 0}, {"scale_factor": 1}, {"min_scale": float("inf")}, {"scale_window": 0}]
    for arguments in bad:
        with pytest.raises(ValueError, match=next(iter(arguments))):
            make_loss_scaler(1.0, True, arguments)
    with pytest.raises(ValueError, match="static_loss_scale"):
        make_loss_scaler(-1.0, False, {})
