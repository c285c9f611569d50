"""Shares of microbatches in the loss of the global batch, by what PyTorch's own loss divides by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_LOSSES = (torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss2d_forward)


class Divisors(TorchDispatchMode):
    """Notes what each mean over targets is divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _LOSSES:
            self.seen.append(float(result[1]))
        return result


def divisor_of(
    model: nn.Module, run: Callable[[], Tensor], num_samples: int
) -> tuple[Tensor, float]:
    """Returns a loss, and its divisor: targets in a model of transformers, samples elsewhere."""
    from transformers import PreTrainedModel

    divisors = Divisors()
    with divisors:
        loss = run()
    counts_targets = isinstance(model, PreTrainedModel) and len(divisors.seen) == 1
    return loss, divisors.seen[0] if counts_targets else float(num_samples)


def shares(weights: Sequence[Sequence[float]]) -> list[list[float]]:
    """Returns the share of each microbatch of each replica in the mean over all."""
    total = sum(map(sum, weights))
    return [[weight / total for weight in own] for own in weights]
