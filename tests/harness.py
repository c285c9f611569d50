"""The training script that tests share: step functions of one argument, and their losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def square_loss(model: Any, x: Tensor) -> Tensor:
    """Computes the mean of the squares of the model's result."""
    loss: Tensor = model(x).square().mean()
    return loss


def own_loss(model: Any, x: Any) -> Tensor:
    """Calls a model whose result is the loss."""
    loss: Tensor = model(x)
    return loss


def labelled_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Calls a model in the form of transformers, whose result has the loss of its labels."""
    loss: Tensor = model(**batch)["loss"]
    return loss


def train_step_of(model: Any, loss_of: Callable[[Any, Any], Tensor] = square_loss) -> Any:
    """Makes the step function of a plain script: the loss, its backward, and the loss as result.

    Args:
        model: the `smp.DistributedModel`.
        loss_of: function of the model and of a microbatch, which returns the loss.
    """
    import smp

    @smp.step
    def train_step(x: Any) -> Tensor:
        loss = loss_of(model, x)
        model.backward(loss)
        return loss

    return train_step


def forward_step(model: Any) -> Any:
    """Makes a step function that returns the model's result without a backward."""
    import smp

    @smp.step
    def forward(x: Any) -> Any:
        return model(x)

    return forward
