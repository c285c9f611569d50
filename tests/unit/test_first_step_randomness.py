"""The check of the first step notices random numbers, also where there is no numpy."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch

from smp.observe.verification.reference import random_state


def refuse(tensor: torch.Tensor) -> NoReturn:
    raise RuntimeError("Numpy is not available")


def test_drawn_numbers_are_noticed_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "numpy", refuse)
    device = torch.device("cpu")
    before = random_state(device)
    assert random_state(device) == before
    torch.rand(1)
    assert random_state(device) != before
