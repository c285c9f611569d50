"""Code that runs besides the real run: what is left behind, and what is said to be."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smp.nn.run_aside import run_aside


class Holder:
    def __init__(self) -> None:
        self.read, self.written = torch.ones(3), torch.ones(3)


def write(x: Tensor, holder: Holder) -> None:
    holder.written += x
    x += 1


def test_tensors_that_were_written_are_told() -> None:
    holder, x = Holder(), torch.ones(3)
    told = run_aside(nn.Linear(3, 3), write, (x, holder), {})
    assert [tensor is holder.written for tensor in told] == [True]
    assert torch.equal(x, torch.ones(3)), "arguments are copies"


def test_tensors_of_inference_mode_are_told_as_well() -> None:
    with torch.inference_mode():
        holder, x = Holder(), torch.ones(3)
        holder.read[0] = torch.nan
        told = run_aside(nn.Linear(3, 3), write, (x, holder), {})
    assert [tensor is holder.written for tensor in told] == [True]
    assert run_aside(nn.Linear(3, 3), lambda *_: None, (x, holder), {}) == []
