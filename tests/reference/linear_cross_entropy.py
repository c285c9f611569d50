"""Cross entropy of a linear head as plain PyTorch expressions, with whole logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    reduction: str = "mean",
    **_: Any,
) -> Tensor:
    """Returns what `smp.nn.functional.linear_cross_entropy` returns for the same arguments."""
    logits, targets = functional.linear(hidden, weight, bias).flatten(0, -2), labels.flatten()
    losses = functional.cross_entropy(
        logits,
        targets,
        weight=class_weights,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    counted = targets != ignore_index
    losses = losses + z_loss * logits.logsumexp(-1).square() * counted
    weights = counted.to(losses.dtype)
    if token_weights is not None:
        weights = weights * token_weights.flatten()
    if reduction == "none":
        return (losses * weights).view(labels.shape)
    if reduction == "sum":
        return (losses * weights).sum()
    classes = 1.0 if class_weights is None else class_weights[targets.where(counted, 0)]
    return (losses * weights).sum() / (weights * classes).sum()


def problem(
    *shape: int,
    features: int = 12,
    vocabulary: int = 29,
    dtype: torch.dtype = torch.float64,
    with_bias: bool = False,
) -> dict[str, Tensor | None]:
    """Returns hidden states of this shape, a head and labels, of which some are ignored."""
    generator = torch.Generator().manual_seed(5)

    def draw(*sizes: int) -> Tensor:
        drawn = torch.randn(sizes, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).requires_grad_()

    labels = torch.randint(0, vocabulary, shape, generator=generator)
    labels.view(-1)[::5] = IGNORED
    return {
        "hidden": draw(*shape, features),
        "weight": draw(vocabulary, features),
        "labels": labels,
        "bias": draw(vocabulary) if with_bias else None,
    }


def options_of(names: tuple[str, ...], shape: tuple[int, ...], vocabulary: int) -> dict[str, Any]:
    """Returns values for the named options; none of them is neutral."""
    generator = torch.Generator().manual_seed(6)
    classes = torch.rand(vocabulary, generator=generator, dtype=torch.float64) + 0.2
    classes[3] = 0.0
    values = {
        "label_smoothing": 0.15,
        "z_loss": 0.03,
        "class_weights": classes,
        "token_weights": torch.rand(shape, generator=generator, dtype=torch.float64) * 2,
    }
    return {name: values[name] for name in names}
