"""Differences of the first step that count, and random numbers that are noticed."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch

from smp.observe.verification.comparison import Stage
from smp.observe.verification.first_step_verdict import OneProcess, Seen, Verdict, judge
from smp.observe.verification.reference import random_state
from smp.observe.verification.rows import row_of


def reference(gradient: float) -> OneProcess:
    value = torch.tensor([gradient], dtype=torch.float64)
    return OneProcess(Stage(items={("gradient", "weight"): value}))


def ranks(*gradients: float) -> list[Seen]:
    """Makes a rank per tensor-parallel part, whose reference has a gradient of 1."""
    return [
        Seen(
            place=f"global_rank {rank}",
            tp_rank=rank,
            gradients={"weight": torch.tensor([gradient], dtype=torch.float64)},
            one=reference(1.0),
        )
        for rank, gradient in enumerate(gradients)
    ]


@pytest.mark.parametrize(
    ("gradients", "moved", "differs"),
    [
        ((1.0, 1.0), (), False),
        ((1.01, 1.0), (), True),
        ((1.01, 1.0), (1.005, 1.0), False),  # rounding is worth as much
        ((1.01, 1.0), (1.0, 1.5), True),  # of another part only
        ((1.01, 1.01), (1.005, 1.0), True),
        ((1.5, 1.0), (1.005, 1.0), True),  # not as much
    ],
)
def test_rounding_explains_the_differences_of_its_own_part(
    gradients: tuple[float, ...], moved: tuple[float, ...], differs: bool
) -> None:
    verdict = judge(ranks(*gradients), [reference(value) for value in moved])
    assert (verdict.difference is not None) == differs
    assert differs or verdict == Verdict()


def test_where_the_moved_run_failed_nothing_is_explained() -> None:
    assert judge(ranks(1.01), [None]).difference is not None


def refuse(tensor: torch.Tensor) -> NoReturn:
    raise RuntimeError("Numpy is not available")


def test_drawn_numbers_are_noticed_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "numpy", refuse)
    device = torch.device("cpu")
    before = random_state(device)
    assert random_state(device) == before
    torch.rand(1)
    assert random_state(device) != before


def test_gradient_that_comes_on_one_side_only_is_a_difference() -> None:
    (rank,) = ranks(1.0)
    rank.gradients["weight"] = None
    assert "none came, " in str(judge([rank]).difference)
    (rank,) = ranks(1.0)
    rank.gradients["bias"] = torch.ones(1, dtype=torch.float64)
    assert "the gradient of 'bias' differs: 1 instead of 0" in str(judge([rank]).difference)


def test_gradients_of_the_scripts_own_backward_are_no_difference_and_not_called_equal() -> None:
    (rank,) = ranks(1.0)
    rank.one = OneProcess(Stage(), has_backward=False)
    verdict = judge([rank])
    assert verdict.difference is None and "gradients were not compared" in str(verdict.reason)
    rank.gradients["weight"] = None  # an evaluation
    assert judge([rank]) == Verdict()


def test_output_that_is_not_fetched_is_compared_by_the_result_of_its_module() -> None:
    (rank,) = ranks(1.0)
    assert rank.one is not None
    row, other = row_of(torch.ones(3)), row_of(torch.full((3,), 2.0))
    assert row is not None
    rank.one.stage.items["output", "output 0"] = row.numbers
    rank.one.rows = {(0, "head", 0): [row]}
    assert judge([rank]) == Verdict()
    rank.rows = {(0, "head", 0): [other]}
    text = str(judge([rank]).difference)
    assert text.startswith("output 0 differs: norm 3.4641 instead of 1.73205 (2 times it)")
    assert "first in the result of module 'head' on global_rank 0" in text
