"""The reducer of one rank against plain autograd: what users see as ``.grad``."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smp import _C
from smp.data_parallel import Reduction, make_records


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def make_reducer(model: nn.Module, **options: object) -> _C.Reducer:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    options = {"bucket_cap_bytes": 512} | options
    return _C.Reducer(
        [p for _, p in named],
        make_records(named, [Reduction("dp_cp", 1.0)] * len(named)),
        None,
        **options,
    )


def loss_of(model: nn.Module, seed: int) -> Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def assert_equal_grads(model: nn.Module, reference: nn.Module) -> None:
    expected = grads_of(reference)
    assert any(g is not None and g.abs().max() > 0 for g in expected.values())
    for name, grad in grads_of(model).items():
        other = expected[name]
        assert (grad is None) == (other is None), name
        assert grad is None or torch.equal(grad, other), name


def test_plain_loop_gives_the_bits_of_autograd() -> None:
    model, reference = make_model(), make_model()
    reducer = make_reducer(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(4):
        for m, optimizer in zip((model, reference), optimizers, strict=True):
            if step % 2 == 0:  # else accumulate
                optimizer.zero_grad(set_to_none=step == 0)
            loss_of(m, step).backward()
        assert_equal_grads(model, reference)
        for optimizer in optimizers:
            optimizer.step()
    assert reducer.stats.num_reductions == 4
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)


def test_frozen_and_unused_parameters_get_no_gradient() -> None:
    model, reference = make_model(), make_model()
    for m in (model, reference):
        m[0].weight.requires_grad_(False)
    reducer = make_reducer(model)
    for m in (model, reference):
        m[2:](torch.ones(1, 8)).sum().backward()
    assert_equal_grads(model, reference)
    assert reducer.stats.num_reductions == 1


def test_hooks_of_users_run_before_the_reduction() -> None:
    model, reference = make_model(), make_model()
    reducer = make_reducer(model)
    for m in (model, reference):
        m[0].weight.register_hook(lambda grad: grad * 3)
        loss_of(m, 0).backward()
    assert_equal_grads(model, reference)
    assert reducer.stats.num_reductions == 1


def test_autograd_grad_is_left_alone() -> None:
    model, reference = make_model(), make_model()
    reducer = make_reducer(model)
    grads = [torch.autograd.grad(loss_of(m, 0), list(m.parameters())) for m in (model, reference)]
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
    assert all(grad is None for grad in grads_of(model).values())
    assert reducer.stats.num_reductions == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_inside_backward_gives_the_same_gradients(use_reentrant: bool) -> None:
    model, reference = make_model(), make_model()
    reducer = make_reducer(model)
    x = torch.randn(4, 5, requires_grad=True)
    for m in (model, reference):
        hidden = checkpoint(m[:2], x, use_reentrant=use_reentrant)
        checkpoint(m[2:], hidden, use_reentrant=use_reentrant).square().mean().backward()
    assert_equal_grads(model, reference)
    assert not reducer.in_step


def test_gradients_keep_no_graph() -> None:
    model = make_model()
    reducer = make_reducer(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of cycles, which there are none of
        loss_of(model, 0).backward(create_graph=True)
    for name, grad in grads_of(model).items():
        assert grad is not None and not grad.requires_grad and grad.grad_fn is None, name
    assert reducer.stats.num_reductions == 1


def test_a_new_reducer_replaces_the_old_one() -> None:
    model, reference = make_model(), make_model()
    first = make_reducer(model)
    del first
    second = make_reducer(model)
    loss_of(model, 0).backward()
    loss_of(reference, 0).backward()
    assert_equal_grads(model, reference)
    assert second.stats.num_reductions == 1
    copied = copy.deepcopy(model)  # without hooks
    loss_of(copied, 0).backward()
    assert second.stats.num_reductions == 1


def test_records_name_what_a_parameter_is() -> None:
    model = make_model()
    named = list(model.named_parameters())
    reductions = [Reduction("dp_cp", 4.0)] * len(named)
    record = make_records(named, reductions, {"0.weight": ["tied"]})[0]
    assert (record.name, record.shape, record.dtype) == ("0.weight", [8, 5], torch.float32)
    assert (record.divisor, record.ties, record.group) == (4.0, ["tied"], _C.ReductionGroup.DP)
    assert record.interval.is_whole and record.local_shape == [8, 5]
