"""Types of step functions and their results, which `scripts/lint.sh` checks; nothing runs it."""

from __future__ import annotations

from torch import Tensor, nn
from typing_extensions import assert_type

import smp


@smp.step
def mean_loss(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).mean()
    return loss


@smp.step(detach_outputs=False)
def loss_and_logits(x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    return x.mean() * scale, x


@smp.step
def by_name(x: Tensor) -> dict[str, Tensor]:
    return {"loss": x.mean()}


def call_all(model: nn.Module, x: Tensor) -> None:
    assert_type(mean_loss(model, x), smp.StepOutput)
    assert_type(mean_loss(model, x).reduce_mean(), Tensor)
    assert_type(loss_and_logits(x, scale=2.0), tuple[smp.StepOutput, smp.StepOutput])
    assert_type(by_name(x), dict[str, smp.StepOutput])
    smp.init({"microbatches": 2, "pipeline": "interleaved"})
