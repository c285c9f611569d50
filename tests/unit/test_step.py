"""Step functions in a world of one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.harness import train_step_of


@pytest.fixture
def model() -> Iterator[smp.DistributedModel]:
    smp.init({"microbatches": 2})
    yield smp.DistributedModel(nn.Linear(3, 1))
    smp.shutdown()


class Broken:
    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Any:
        raise ValueError("cannot be cut")


def test_a_step_that_failed_does_not_spoil_the_next(model: smp.DistributedModel) -> None:
    @smp.step
    def train_step(x: Tensor, extra: Any) -> Tensor:
        loss: Tensor = model(x).mean()
        model.backward(loss)
        if extra == "raise":
            raise RuntimeError("in the body")
        return loss

    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match="cannot be cut"):
        train_step(x, Broken())
    with pytest.raises(RuntimeError, match="in the body"):
        train_step(x, "raise")
    train_step(x, None)
    plain = nn.Linear(3, 1)
    plain.load_state_dict(model.state_dict())
    plain(x).mean().backward()
    assert torch.allclose(model.get_module().weight.grad, plain.weight.grad)


# ---- several models ------------------------------------------------------------------


class Twins:
    """A generator and a discriminator of one shape, and the same unwrapped."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        self.plain = [nn.Linear(3, 3, dtype=torch.float64) for _ in range(2)]
        torch.manual_seed(4)
        self.models = [smp.DistributedModel(nn.Linear(3, 3, dtype=torch.float64)) for _ in range(2)]


@pytest.fixture
def twins() -> Iterator[Twins]:
    smp.init({"microbatches": 2})
    yield Twins()
    smp.shutdown()


def check_gradients(twins: Twins) -> None:
    for plain, model in zip(twins.plain, twins.models, strict=True):
        for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
            if expected.grad is None:
                assert parameter.grad is None
            else:
                assert parameter.grad is not None and expected.grad.abs().max() > 0
                assert torch.allclose(parameter.grad, expected.grad, rtol=1e-12)


def test_two_models_train_in_one_step_function(twins: Twins) -> None:
    first, second = twins.models

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        loss = second(torch.tanh(first(x))).square().mean()
        second.backward(loss)
        return loss

    x = torch.randn(5, 3, dtype=torch.float64)  # uneven: weights go to both models
    loss = train_step(x)
    expected = twins.plain[1](torch.tanh(twins.plain[0](x))).square().mean()
    expected.backward()
    assert torch.allclose(loss.reduce_mean(), expected)
    check_gradients(twins)


def test_two_models_train_in_step_functions_of_their_own(twins: Twins) -> None:
    def make_step(model: smp.DistributedModel) -> Any:
        train_step = train_step_of(model)
        return train_step

    first_step, second_step = (make_step(model) for model in twins.models)
    optimizers = [
        smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for model in twins.models
    ]
    plain_optimizers = [torch.optim.SGD(plain.parameters(), lr=0.1) for plain in twins.plain]
    x = torch.randn(4, 3, dtype=torch.float64)
    for step, i in ((first_step, 0), (second_step, 1), (first_step, 0)):
        step(x)
        twins.plain[i](x).square().mean().backward()
        check_gradients(twins)
        for optimizer in (optimizers[i], plain_optimizers[i]):
            optimizer.step()
            optimizer.zero_grad()
    for plain, model in zip(twins.plain, twins.models, strict=True):
        for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.allclose(parameter, expected, rtol=1e-12)
    state = optimizers[1].state_dict()
    optimizers[1].load_state_dict(state)


def test_calls_that_name_no_model_list_the_candidates(twins: Twins) -> None:
    with pytest.raises(RuntimeError, match=r"0: Linear of 1.2e-05 M.*; 1: Linear.*the model that"):
        _ = smp.world.runtime.current().wrapped.model
    assert smp.world.runtime.current().wrapped.models == twins.models


def test_arguments_of_several_sizes_are_whole_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A table was cut like a batch, and pieces of one row broadcast."""
    smp.init({"microbatches": 2})

    @smp.step
    def cut(x: Tensor, table: Tensor) -> Tensor:
        return x * table

    @smp.step(non_split_inputs=["table"])
    def named(x: Tensor, table: Tensor) -> Tensor:
        return x * table

    x, table = torch.ones(4, 2), torch.tensor([1.0, 2.0])
    with caplog.at_level(logging.WARNING, logger="smp"):
        assert torch.equal(named(x, table).concat(), x * table)
        cut(x, torch.ones(4, 1))
        assert not caplog.messages
        for _ in range(2):
            assert torch.equal(cut(x, table).concat(), x * table)
    [text] = caplog.messages
    assert "gives each the whole of arguments of other sizes: table (2,)" in text
    assert "non_split_inputs" in text and "input_split_axes" in text
    smp.shutdown()


def test_one_row_is_for_all_microbatches() -> None:
    """A state or a mask of one row made the step one microbatch."""
    smp.init({"microbatches": 4})

    @smp.step
    def add(x: Tensor, mask: Tensor, *rest: Tensor) -> Tensor:
        return x + mask + rest[0]

    x, mask = torch.randn(8, 3, 3), torch.randn(1, 3, 3)
    found = add(x, mask, x)
    assert len(found.outputs) == 4 and torch.equal(found.concat(), x + mask + x)
    smp.shutdown()


def test_lists_by_sample_are_cut() -> None:
    """Boxes inside of the dictionaries were cut, and the list was not."""
    smp.init({"microbatches": 2})
    seen = []

    @smp.step
    def read(images: Any, targets: Any, texts: Any) -> None:
        seen.append(([*images], [*targets], texts))

    images = [torch.ones(3, 4, 4) * i for i in range(4)]
    targets = [{"boxes": torch.ones(i, 4)} for i in range(4)]
    read(images, targets, list("abcd"))
    assert seen == [(images[b:e], targets[b:e], list("abcd")[b:e]) for b, e in ((0, 2), (2, 4))]
    smp.shutdown()


def test_what_an_earlier_batch_taught_ends_with_the_runtime() -> None:
    @smp.step
    def cut(x: Tensor, y: Tensor) -> Tensor:
        return y

    for sizes in ([(4, 6), (6, 6)], [(6, 6)]):
        smp.init({"microbatches": 2})
        found = [cut(torch.ones(a, 3), torch.ones(b)).outputs[0].shape[0] for a, b in sizes]
        assert found == ([6, 6] if len(sizes) > 1 else [3])
        smp.shutdown()


def test_what_cannot_be_cut_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Kept:
        def __init__(self) -> None:
            self.x = torch.ones(4)

    smp.init({"microbatches": 2})

    @smp.step
    def read(x: Tensor, kept: Any) -> Tensor:
        return x

    @smp.step(non_split_inputs=["kept"])
    def whole(x: Tensor, kept: Any) -> Tensor:
        return x

    with caplog.at_level(logging.WARNING, logger="smp"):
        whole(torch.ones(4), Kept())
        assert not caplog.messages
        for _ in range(2):
            read(torch.ones(4), Kept())
    [text] = caplog.messages
    assert "gives each of its 2 microbatches the whole of kept" in text
    smp.shutdown()
