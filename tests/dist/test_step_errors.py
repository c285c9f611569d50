"""Mistakes in a training script are told on every rank, with what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.pool import Pool
from tests.dist.training import Run, init, make_model

CHAIN = Run("chain", 2, 1, microbatches=4, manual=True)


def expect_everywhere(
    pool: Pool, world_size: int, function: Any, *args: Any, error: str, text: str
) -> None:
    """Checks that all ranks raise `error` (or a subclass) with a matching text."""
    outcomes = pool.outcomes(world_size, function, *args)
    for outcome in outcomes:
        assert outcome.error, f"rank {outcome.rank} raised nothing"
        assert error in outcome.bases, outcome.traceback
        assert re.search(text, outcome.message, re.DOTALL), outcome.traceback


def one_sample(rank: int, dims: list[int]) -> None:
    import smp

    init(CHAIN)
    model = make_model(CHAIN)

    @smp.step(input_split_axes={"images": 1})
    def train(images: Tensor) -> Tensor:
        loss = model(images).square().mean()
        model.backward(loss)
        return loss

    train(torch.randn([6, 8][: dims[rank]], dtype=torch.float64))


def test_batch_without_its_batch_dimension_is_an_error_on_all_ranks(pool: Pool) -> None:
    expect_everywhere(pool, 2, one_sample, [1, 1], error="ValueError", text=r"images.*6.*axes")


def test_bad_batch_on_the_driver_alone_is_an_error_on_all_ranks(pool: Pool) -> None:
    outcomes = pool.outcomes(2, one_sample, [1, 2])
    assert outcomes[0].error == "ValueError", outcomes[0].traceback
    assert "PeerFailure" in outcomes[1].bases, outcomes[1].traceback
    assert "rank 0" in outcomes[1].message and "images" in outcomes[1].message


def bad_partition_context(rank: int) -> None:
    import smp

    init(CHAIN)
    with smp.partition(2):
        torch.nn.Linear(2, 2)


def bad_set_partition(rank: int) -> None:
    import smp

    init(CHAIN)
    smp.set_partition(torch.nn.Linear(2, 2), 5)


@pytest.mark.parametrize(
    ("function", "index"), [(bad_partition_context, 2), (bad_set_partition, 5)]
)
def test_partition_beyond_the_pipeline_is_an_error(pool: Pool, function: Any, index: int) -> None:
    expect_everywhere(pool, 2, function, error="ValueError", text=rf"{index}.*2")


def trace_times_on_cpu(rank: int) -> None:
    import smp

    init(CHAIN)
    smp.DistributedModel(torch.nn.Linear(2, 2), trace_device="cpu", trace_execution_times=True)


def test_tracing_times_on_cpu_is_an_error(pool: Pool) -> None:
    expect_everywhere(
        pool,
        2,
        trace_times_on_cpu,
        error="ValueError",
        text="trace_execution_times.*trace_device|trace_device.*trace_execution_times",
    )


def wrap_twice(rank: int, inner: bool) -> None:
    import smp

    init(CHAIN)
    first = smp.DistributedModel(torch.nn.Linear(2, 2))
    smp.DistributedModel(first if inner else first.get_module())


@pytest.mark.parametrize("inner", [False, True])
def test_wrapping_twice_is_an_error(pool: Pool, inner: bool) -> None:
    expect_everywhere(
        pool, 2, wrap_twice, inner, error="ValueError", text="(DistributedModel|wrapped) already"
    )


def forward_outside(rank: int) -> None:
    init(CHAIN)
    make_model(CHAIN)(torch.randn(4, 6, dtype=torch.float64))


def backward_outside(rank: int) -> None:
    init(CHAIN)
    make_model(CHAIN).backward(torch.randn((), requires_grad=True))


@pytest.mark.parametrize("function", [forward_outside, backward_outside])
def test_calls_outside_a_step_explain_themselves(pool: Pool, function: Any) -> None:
    expect_everywhere(pool, 2, function, error="RuntimeError", text=r"smp\.step")


class Remembers(torch.nn.Module):
    """Keeps its loss in an attribute, as llama2.c does."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6).double() for _ in range(2))
        self.last_loss = loss

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.last_loss = x.square().mean()
        return x


def loss_from_an_attribute(rank: int, before: Any) -> None:
    import smp

    init(CHAIN)
    net = Remembers(before)
    model = smp.DistributedModel(net)
    smp.set_partition(net.layers[1], 1)

    @smp.step
    def train(x: Tensor) -> Tensor:
        model(x)
        loss = model.last_loss
        model.backward(loss)
        return loss

    train(torch.randn(8, 6, dtype=torch.float64)).reduce_mean()


@pytest.mark.parametrize("before", [None, 0.0])
def test_a_loss_that_only_the_driver_has_is_an_error_on_all_ranks(pool: Pool, before: Any) -> None:
    outcomes = pool.outcomes(2, loss_from_an_attribute, before)
    for outcome in outcomes:
        assert outcome.error, f"rank {outcome.rank} raised nothing"
        assert "return the loss from forward" in outcome.message, outcome.traceback
    assert outcomes[1].error == "TypeError", outcomes[1].traceback
    assert "PeerFailure" in outcomes[0].bases, outcomes[0].traceback


def backward_of(rank: int, pp: int, kind: str) -> None:
    import smp

    smp.init({"pipeline_parallel_degree": pp, "auto_partition": False})
    model = smp.DistributedModel(torch.nn.Linear(6, 6))

    @smp.step
    def train(x: Tensor) -> None:
        loss = model(x).square().mean()
        if kind == "number":
            model.backward(loss.item())
        elif kind == "list":
            model.backward([loss, None])
        elif kind == "dict":
            model.backward({"loss": loss})
        elif kind == "gradient":
            model.backward(loss, 2.0)
        else:
            model.backward([loss], [torch.ones(()), torch.ones(())])

    train(torch.randn(8, 6))


@pytest.mark.sample(keep=5)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("number", "TypeError", "model.backward .*float"),
        ("list", "TypeError", "model.backward .*None"),
        ("dict", "TypeError", "model.backward .*dict"),
        ("gradient", "TypeError", "model.backward .*grad_tensors, got a float"),
        ("count", "ValueError", "1 tensors and 2 grad_tensors"),
    ],
)
def test_a_backward_of_something_else_is_an_error(
    pool: Pool, pp: int, kind: str, error: str, text: str
) -> None:
    outcomes = pool.outcomes(pp, backward_of, pp, kind)
    assert any(outcome.error == error for outcome in outcomes), outcomes[0].traceback
    for outcome in outcomes:
        assert re.search(text, outcome.message, re.DOTALL), outcome.traceback


def shut_down_inside(rank: int, where: str) -> None:
    import smp

    init(CHAIN)
    model = make_model(CHAIN)
    if where == "module":
        remote = model.get_module().layers[1]
        remote.register_forward_pre_hook(lambda *_: smp.shutdown())

    @smp.step
    def train(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if where == "everywhere" or (where == "driver" and rank == 0):
            smp.shutdown()
        model.backward(loss)
        return loss

    train(torch.randn(8, 6, dtype=torch.float64))


@pytest.mark.parametrize("where", ["everywhere", "driver", "module"])
def test_shutdown_inside_a_step_is_an_error_on_all_ranks(pool: Pool, where: str) -> None:
    expect_everywhere(
        pool,
        2,
        shut_down_inside,
        where,
        error="RuntimeError",
        text="smp.shutdown was called inside",
    )


def nested_steps(rank: int) -> None:
    import smp

    init(CHAIN)
    model = make_model(CHAIN)

    @smp.step
    def inner(x: Tensor) -> Tensor:
        return model(x)

    @smp.step
    def outer(x: Tensor) -> Tensor:
        return inner(x).concat()

    with torch.no_grad():
        outer(torch.randn(8, 6, dtype=torch.float64))


def test_a_step_inside_a_step_is_an_error(pool: Pool) -> None:
    outcomes = pool.outcomes(2, nested_steps)
    for outcome in outcomes:
        assert outcome.error, f"rank {outcome.rank} raised nothing"
    assert any(re.search("nest|inside", o.message) for o in outcomes), outcomes[0].traceback


def unimplemented_argument(rank: int, kwargs: dict[str, Any]) -> None:
    import smp

    init(Run("chain", 1, 1))
    smp.DistributedModel(torch.nn.Linear(2, 2), **kwargs)


def unknown_step_argument(rank: int, kwargs: dict[str, Any]) -> None:
    import smp

    init(Run("chain", 1, 1, microbatches=2))

    @smp.step(**kwargs)
    def forward(x: Tensor) -> Tensor:
        return x

    forward(torch.randn(8, 6))


@pytest.mark.parametrize("kwargs", [{"non_split_inputs": ["y"]}, {"input_split_axes": {"y": 1}}])
def test_step_names_arguments_that_do_not_exist(pool: Pool, kwargs: dict[str, Any]) -> None:
    expect_everywhere(pool, 1, unknown_step_argument, kwargs, error="ValueError", text="'?y'?")


def bad_split_axis(rank: int) -> None:
    import smp

    init(Run("chain", 1, 1, microbatches=2))

    @smp.step(input_split_axes={"x": 3})
    def forward(x: Tensor) -> Tensor:
        return x

    forward(torch.randn(8, 6))


def test_split_axis_beyond_the_tensor_is_an_error(pool: Pool) -> None:
    expect_everywhere(pool, 1, bad_split_axis, error="ValueError", text="x.*3")


def different_structures(rank: int) -> None:
    import smp

    init(CHAIN)
    model = make_model(CHAIN)
    calls = []

    @smp.step
    def forward(x: Tensor) -> Any:
        calls.append(0)
        odd = len(calls) % 2
        out = model(x)  # other microbatches begin while this one waits
        return out if odd else (out, out)

    with torch.no_grad():
        forward(torch.randn(8, 6, dtype=torch.float64))


def test_results_that_differ_between_microbatches_are_an_error(pool: Pool) -> None:
    expect_everywhere(pool, 2, different_structures, error="Exception", text="microbatch")


def different_configs(rank: int) -> None:
    import smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2 + 2 * rank})


def test_mismatching_config_is_told_on_all_ranks(pool: Pool) -> None:
    expect_everywhere(pool, 2, different_configs, error="Exception", text="microbatches")


def different_models(rank: int) -> None:
    import smp

    init(Run("chain", 2, 1, microbatches=2))
    model = smp.DistributedModel(
        torch.nn.Sequential(torch.nn.Linear(4, 4 + rank), torch.nn.Linear(4 + rank, 4))
    )

    @smp.step
    def forward(x: Tensor) -> Tensor:
        return model(x)

    with torch.no_grad():
        forward(torch.randn(8, 4))


def test_different_models_are_told_on_all_ranks(pool: Pool) -> None:
    expect_everywhere(pool, 2, different_models, error="Exception", text=r"rank|differ|agree")


def different_step_functions(rank: int) -> None:
    import smp

    init(CHAIN)
    model = make_model(CHAIN)

    @smp.step
    def training(x: Tensor) -> Tensor:
        return model(x)

    @smp.step
    def evaluation(x: Tensor) -> Tensor:
        return model(x)

    x = torch.randn(8, 6, dtype=torch.float64)
    with torch.no_grad():
        training(x)
        (evaluation if rank else training)(x)


def test_different_step_functions_are_told_on_all_ranks(pool: Pool) -> None:
    outcomes = pool.outcomes(2, different_step_functions)
    for outcome in outcomes:
        assert outcome.error, f"rank {outcome.rank} raised nothing"
        assert "training" in outcome.message and "evaluation" in outcome.message, outcome.traceback


def gradient_penalty(rank: int, keeps_graph: bool) -> None:
    import smp

    init(CHAIN)
    model = make_model(CHAIN)

    @smp.step
    def train(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        score = model(x).sum()
        if rank == 1 and keeps_graph:  # so that the first rank comes to the end of its own
            model.backward(score)
            return score
        (grad,) = torch.autograd.grad(score, x, create_graph=True)
        loss = score + (grad.norm() - 1).square()
        model.backward(loss)
        return loss

    train(torch.randn(8, 6, dtype=torch.float64))


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_a_penalty_of_gradients_in_a_pipeline_is_refused_with_its_reason(
    pool: Pool, keeps_graph: bool
) -> None:
    text = r"step '\S*train' takes a derivative of .*\(0: \w+ of .*WGAN-GP.*degree to 1"
    for outcome in pool.outcomes(2, gradient_penalty, keeps_graph):
        assert re.search(text, outcome.message, re.DOTALL), outcome.message
