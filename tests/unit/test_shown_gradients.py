"""``.grad`` of 16-bit parameters, whose gradients belong to their masters."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.unit.test_precision import HALVES, make


def true_gradients(model: Any) -> list[Tensor]:
    """Returns gradients in float32 of the model with its 16-bit values."""
    plain = copy.deepcopy(model.get_module()).float()
    plain.zero_grad()
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    plain(x.half().float()).square().mean().backward()
    return [p.grad for p in plain.parameters()]


@pytest.mark.parametrize("kind", ["AdamW", "FusedAdam"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("key", HALVES)
def test_parameters_show_the_gradients_of_a_step(
    start: Any, key: str, dynamic: bool, kind: str
) -> None:
    """Compares gradients without the loss scale, until they are applied or thrown away."""
    start(**{key: True})
    optimizer_class = getattr(smp.optimizers if kind == "FusedAdam" else torch.optim, kind)
    scale = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 256.0}}
    model, optimizer, run = make(
        optimizer_class, **(scale if dynamic else {"static_loss_scale": 256.0})
    )
    params = list(model.parameters())
    assert all(p.grad is None for p in params)
    for clear in (optimizer.zero_grad, model.zero_grad):
        expected = true_gradients(model)
        run()
        for p, q in zip(params, expected, strict=True):
            assert p.grad is not None and p.grad.dtype == p.dtype and p.grad is p.grad
            torch.testing.assert_close(p.grad.float(), q, rtol=3e-2, atol=2e-2)
        assert any(p.grad.any() for p in params)
        total = math.sqrt(sum(float(p.grad.float().square().sum()) for p in params))
        norm = float(optimizer.clip_master_grads(total / 2))
        assert norm == pytest.approx(total, rel=1e-2)
        clipped = math.sqrt(sum(float(p.grad.float().square().sum()) for p in params))
        assert clipped == pytest.approx(total / 2, rel=1e-2)
        optimizer.step()
        assert all(p.grad is None for p in params)
        clear()
        assert all(p.grad is None for p in params)
    run()
    optimizer.step()
    run()  # adds to what is there
    assert all(p.grad is not None for p in params)


def test_an_overflow_is_seen_in_gradients(start: Any) -> None:
    start(fp16=True)
    model, optimizer, run = make(static_loss_scale=2.0**40)
    run()
    assert optimizer.overflow
    assert not all(p.grad.isfinite().all() for p in model.parameters())


def test_assigning_a_gradient_reaches_the_update(start: Any) -> None:
    results = []
    for factor in (0.5, 1.0):
        start(fp16=True)
        model, optimizer, run = make(torch.optim.SGD, static_loss_scale=64.0)
        before = [p.clone() for p in optimizer.fp32_from_fp16_groups[0]]
        run()
        for p in model.parameters():
            p.grad = p.grad * factor
        p.grad *= 1.0  # in place, and assigned by Python
        optimizer.step()
        results.append(
            [p - q for p, q in zip(optimizer.fp32_from_fp16_groups[0], before, strict=True)]
        )
        smp.shutdown()
    assert any(moved.any() for moved in results[0])
    for half, full in zip(*results, strict=True):
        torch.testing.assert_close(half, full / 2, rtol=2e-3, atol=1e-6)
    start(fp16=True)
    model, optimizer, run = make(torch.optim.SGD)
    run()
    with pytest.raises(RuntimeError, match="the gradient of '0.weight' has shape"):
        next(model.parameters()).grad = torch.ones(1)


@pytest.mark.parametrize("key", HALVES)
def test_resetting_gradients_one_by_one_resets_those_of_masters(start: Any, key: str) -> None:
    start(**{key: True})
    model, optimizer, run = make()
    for p in model.parameters():
        p.grad = None
    run()
    first = [p.grad.clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    assert all(p.grad is None for p in optimizer.fp32_from_fp16_groups[0])
    run()
    assert all(torch.equal(p.grad, q) for p, q in zip(model.parameters(), first, strict=True))
    del next(model.parameters()).grad
    assert optimizer.fp32_from_fp16_groups[0][0].grad is None


def test_writing_to_a_shown_gradient_is_an_error(start: Any) -> None:
    start(fp16=True)
    model, optimizer, run = make()
    for use in (optimizer.step, lambda: optimizer.clip_master_grads(1.0)):
        run()
        for parameter in model.parameters():
            parameter.grad.mul_(1e-3)
        with pytest.raises(RuntimeError, match="somebody wrote to .grad of '0.weight'.*clip_m"):
            use()
        optimizer.zero_grad()
    run()
    optimizer.step()  # nothing is left of that


def test_gradients_are_shown_in_a_plain_loop(start: Any) -> None:
    start(fp16=True)
    model, optimizer, _ = make(static_loss_scale=32.0)
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    for clear in (optimizer.zero_grad, model.zero_grad):
        expected = true_gradients(model)
        model.backward(model(x).square().mean())
        for p, q in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad.float(), q, rtol=3e-2, atol=2e-2)
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())
        clear()


def test_copies_of_16_bit_parameters_have_gradients_of_their_own(start: Any) -> None:
    start(bf16=True)
    model, _, run = make()
    run()
    twin = copy.deepcopy(model.get_module())
    assert all(p.grad is None for p in twin.parameters())
    twin(torch.ones(4, 5, dtype=torch.bfloat16)).sum().backward()
    assert all(p.grad is not None for p in twin.parameters())
    buffer = io.BytesIO()
    torch.save(next(model.parameters()), buffer)
    buffer.seek(0)
    assert type(torch.load(buffer, weights_only=False)) is nn.Parameter
