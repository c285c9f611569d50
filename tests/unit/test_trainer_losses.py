"""Tests that a trainer knows whether its loss is divided by the number of labels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", minversion="5.0")

from smp.integrations.trainer_losses import is_divided

INPUTS = {"x": torch.ones(4, 3)}


def divided(model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor) -> Tensor:
    return model(inputs["x"]).sum() / num_items_in_batch


def mean(model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor) -> Tensor:
    return model(inputs["x"]).mean()


def logged(model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor) -> Tensor:
    loss = model(inputs["x"]).mean()
    print(f"{loss.item():.3f}")
    return loss


def found(compute_loss: Callable[..., Tensor], **attributes: Any) -> bool:
    model, args = nn.Linear(3, 2), SimpleNamespace(device="cpu")
    weights = [parameter.clone() for parameter in model.parameters()]
    trainer: Any = SimpleNamespace(compute_loss=compute_loss, args=args, **attributes)
    wrapped: Any = SimpleNamespace(get_module=lambda: model)
    with torch.no_grad():  # an evaluation may be first
        result = is_divided(trainer, wrapped, INPUTS)
    assert all(map(torch.equal, weights, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())
    return result


def test_a_loss_is_divided_if_its_graph_leads_to_the_number() -> None:
    assert found(divided) is True
    assert found(mean) is False


def test_the_trainer_may_state_it() -> None:
    assert found(mean, loss_is_scaled_for_ga=True) is True
    assert found(divided, loss_is_scaled_for_ga=False) is False


def test_a_loss_that_needs_values_counts_as_divided_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="smp"):
        assert found(logged) is True
    assert "whether the loss is divided by num_items_in_batch cannot be found out" in caplog.text
    assert "set loss_is_scaled_for_ga = False on the trainer" in caplog.text
