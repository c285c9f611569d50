"""The first step: the driver traces the call in the step function, all ranks get one partition."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool
from tests.dist.training import (
    RankRecord,
    Run,
    check_runs,
    init,
    join_parts,
    local_parameters,
    make_model,
)
from tests.reference.data import make_batch
from tests.reference.models import build
from tests.reference.tolerances import TOLERANCE

CHAIN = Run("chain", 2, 1)


def test_traced_partition_trains_with_dummies_on_other_ranks(pool: Pool) -> None:
    runs = [
        Run(case, 2, 1, schedule, dummies=True, steps=2)
        for case in ("gpt2", "bert")
        for schedule in ("interleaved", "simple")
    ]
    check_runs(pool, runs)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def watch_log() -> list[str]:
    handler = Lines()
    logger = logging.getLogger("smp")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return handler.lines


class HeavyInTime(nn.Module):
    """Equal parameters everywhere; the first layer alone is called, many times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(9):
            x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:]:
            x = layer(x)
        return x


def places(rank: int, skip_tracing: bool) -> tuple[list[str], list[bool]]:
    import smp

    smp.init(
        {"pipeline_parallel_degree": 2, "microbatches": 2, "memory_weight": 0.0}
        | ({"skip_tracing": True} if skip_tracing else {})
    )
    model = smp.DistributedModel(HeavyInTime())
    traced: list[bool] = []

    @smp.step
    def train(x: Tensor) -> None:
        traced.append(smp.is_tracing())
        model.backward(model(x).square().mean())

    train(torch.randn(32, 64))
    train(torch.randn(32, 64))
    names = [name for name, module in model.local_named_modules() if isinstance(module, nn.Linear)]
    return names, traced


def test_costs_of_the_call_decide_and_skip_tracing_leaves_parameter_sizes(pool: Pool) -> None:
    (first, seen), (second, seen_by_other) = pool.run(2, places, False)
    busy = first if "layers.0" in first else second
    assert busy == ["layers.0"], "nine of twelve calls outweigh the rest"
    assert sorted(first + second) == [f"layers.{i}" for i in range(4)]
    assert seen == [True] + 4 * [False] and seen_by_other == 4 * [False]
    (first, seen), (second, _) = pool.run(2, places, True)
    assert len(first) == len(second) == 2 and not any(seen)


def random_numbers(rank: int, skip_tracing: bool) -> tuple[Tensor, Tensor]:
    import smp

    run = Run("dropping", 2, 1, config=(("skip_tracing", skip_tracing),))
    init(run)
    torch.manual_seed(11)
    model = make_model(run)

    @smp.step
    def evaluate(x: Tensor) -> Tensor:
        return model(x * torch.rand(()))

    torch.manual_seed(12)
    out = evaluate(make_batch("dropping", run.dtype, 0, 0)["x"]).concat()
    return out.detach(), torch.rand(4)


def test_the_trace_leaves_random_numbers_alone(pool: Pool) -> None:
    for traced, plain in zip(
        pool.run(2, random_numbers, False), pool.run(2, random_numbers, True), strict=True
    ):
        assert torch.equal(traced[1], plain[1])


def raise_before_the_call(rank: int) -> None:
    import smp

    init(CHAIN)
    model = make_model(CHAIN)

    @smp.step
    def train(x: Tensor) -> None:
        if smp.pp_rank() == 0:
            raise KeyError("no such column")
        model.backward(model(x).mean())

    train(torch.randn(8, 6, dtype=torch.float64))


def test_an_error_in_the_step_function_before_the_call_raises_everywhere(pool: Pool) -> None:
    driver, other = pool.outcomes(2, raise_before_the_call)
    assert driver.error == "KeyError", driver.traceback
    assert "PeerFailure" in other.bases and "no such column" in other.message, other.traceback


def too_few_modules(rank: int) -> None:
    import smp

    smp.init({"pipeline_parallel_degree": 2})
    model = smp.DistributedModel(nn.Linear(2, 2))

    @smp.step
    def evaluate(x: Tensor) -> Tensor:
        return model(x)

    evaluate(torch.ones(2, 2))


def test_a_model_that_cannot_be_partitioned_is_refused_with_one_text(pool: Pool) -> None:
    outcomes = pool.outcomes(2, too_few_modules)
    assert [outcome.error for outcome in outcomes] == ["ValueError", "ValueError"]
    texts = {outcome.message.split("] ")[-1] for outcome in outcomes}
    assert len(texts) == 1, texts


def other_model_on_rank_1(rank: int) -> None:
    import smp

    smp.init({"pipeline_parallel_degree": 2})
    model = smp.DistributedModel(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4 - rank))))

    @smp.step
    def evaluate(x: Tensor) -> Tensor:
        return model(x)

    evaluate(torch.ones(2, 2))


def test_another_model_on_another_rank_is_refused_everywhere(pool: Pool) -> None:
    outcomes = pool.outcomes(2, other_model_on_rank_1)
    assert [outcome.error for outcome in outcomes] == ["ValueError", "ValueError"]
    assert all("another model" in outcome.message for outcome in outcomes)


def first_step_without_the_model(rank: int) -> list[str]:
    import smp

    lines = watch_log()
    init(CHAIN)
    model = make_model(CHAIN)

    @smp.step
    def prepare(x: Tensor) -> Tensor:
        return x * 2

    @smp.step
    def train(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    x = torch.randn(8, 6, dtype=torch.float64)
    assert torch.equal(prepare(x).concat(), x * 2)
    assert model.partitioned
    train(x)
    return lines


def test_a_first_step_without_the_model_goes_by_parameter_sizes(pool: Pool) -> None:
    driver, other = pool.run(2, first_step_without_the_model)
    assert any("does not call the model" in line for line in driver)
    assert not any("does not call the model" in line for line in other)


def swallow_exceptions(rank: int) -> float:
    import smp

    init(CHAIN)
    model = make_model(CHAIN)

    @smp.step
    def train(x: Tensor) -> Tensor:
        try:
            out = model(x)
        except Exception:
            raise AssertionError("handlers of the user must not see the trace") from None
        with torch.autocast("cpu", torch.bfloat16):
            loss = out.square().mean()
        model.backward(loss)
        return loss

    return float(train(torch.randn(8, 6, dtype=torch.float64)).reduce_mean())


def test_handlers_in_the_step_function_do_not_see_the_trace(pool: Pool) -> None:
    first, second = pool.run(2, swallow_exceptions)
    assert first == second


# ---- delayed initialisation ----------------------------------------------------------


def train_delayed(rank: int, pp: int) -> RankRecord:
    from transformers import GPT2Config, GPT2LMHeadModel

    import smp

    smp.init({"pipeline_parallel_degree": pp, "microbatches": 2})
    config = GPT2Config(
        vocab_size=41, n_positions=16, n_embd=16, n_layer=4, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(1 + rank)  # of creation, which must not matter
    with smp.delay_param_initialization():
        plain = GPT2LMHeadModel(config)
    assert all(p.is_meta for p in plain.parameters())
    torch.manual_seed(3)
    model = smp.DistributedModel(plain)
    objects = {id(p) for p in plain.parameters()}
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch)["loss"]
        model.backward(loss)
        return loss

    record = RankRecord(smp.pp_rank(), smp.dp_rank())
    for step in range(2):
        out = train(make_batch("gpt2", torch.float32, 0, step))
        record.losses.append([loss.item() for loss in out.outputs])
        optimizer.step()
        optimizer.zero_grad()
    assert objects == {id(p) for p in model.parameters()}, "parameters keep their identity"
    record.params = {n: p.detach().clone() for n, p in local_parameters(model).items()}
    return record


def test_delayed_parameters_are_the_same_under_every_partition(pool: Pool) -> None:
    (alone,) = pool.run(1, train_delayed, 1)
    halves = pool.run(2, train_delayed, 2)
    assert all(0 < len(half.params) < len(alone.params) for half in halves)
    joined = join_parts(halves, Run("gpt2", 2, 1), "params")
    assert joined.keys() == alone.params.keys()
    for name, parameter in joined.items():
        assert (parameter - alone.params[name]).abs().max() < 1e-5, name
    assert torch.tensor(halves[0].losses) == pytest.approx(torch.tensor(alone.losses), abs=1e-5)


def uninitialised(rank: int) -> None:
    import smp

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    smp.init({"pipeline_parallel_degree": 2})
    with smp.delay_param_initialization():
        model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), Bare(), nn.Linear(4, 4)))

    @smp.step
    def evaluate(x: Tensor) -> Tensor:
        return model(x)

    evaluate(torch.ones(2, 4))


def test_a_parameter_that_nothing_initialises_is_named(pool: Pool) -> None:
    outcomes = pool.outcomes(2, uninitialised)
    assert any(o.error == "ValueError" and "'1.scale'" in o.message for o in outcomes)
    assert all(o.error for o in outcomes)


# ---- super().forward -----------------------------------------------------------------


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class ByForward(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class ByOriginal(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super()._orig_forward(x) + x


class Pair(nn.Module):
    def __init__(self, kind: type[Base]) -> None:
        super().__init__()
        self.first, self.second, self.head = kind(), kind(), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


def call_super(rank: int, original: bool) -> tuple[Tensor, dict[str, Tensor]]:
    import smp

    smp.init({"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0})
    torch.manual_seed(1)
    plain = Pair(ByOriginal if original else ByForward)
    model = smp.DistributedModel(plain)
    smp.set_partition(plain.second, 1)

    @smp.step
    def train(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    loss = train(torch.linspace(-1, 1, 24).view(4, 6)).reduce_mean()
    return loss, {n: p.grad for n, p in local_parameters(model).items() if p.grad is not None}


@pytest.mark.parametrize("original", [False, True])
def test_forward_of_the_base_class_is_within_reach_of_replaced_modules(
    pool: Pool, original: bool
) -> None:
    results = pool.run(2, call_super, original)
    torch.manual_seed(1)
    plain = Pair(ByForward)
    loss = plain(torch.linspace(-1, 1, 24).view(4, 6)).square().mean()
    loss.backward()
    for own_loss, _ in results:
        assert torch.allclose(own_loss, loss)
    grads = results[0][1] | results[1][1]
    for name, parameter in plain.named_parameters():
        assert torch.allclose(grads[name], parameter.grad, atol=1e-6), name


# ---- batches that microbatches do not divide -----------------------------------------

CASE = "chain"


def square_loss(model: Any, x: Tensor) -> Tensor:
    """Needs no target, which ranks with dummies would not have."""
    out: Tensor = model(x)
    return (out - 0.5).square().mean()


def train_uneven(rank: int, run: Run, samples: int, plain_backward: bool) -> dict[str, Any]:
    import smp

    init(run)
    model = make_model(run)

    @smp.step
    def train(batch: dict[str, Tensor]) -> Tensor:
        loss = square_loss(model, batch["x"])
        if plain_backward:
            loss.backward()
        else:
            model.backward(loss)
        return loss

    batch = make_batch(CASE, run.dtype, smp.dp_rank(), 0)
    batch = {name: tensor[:samples] for name, tensor in batch.items()}
    if run.dummies and smp.pp_rank() != 0:
        batch = {name: torch.empty(3, 0) for name in batch}
    loss = train(batch)
    grads = {n: p.grad for n, p in local_parameters(model).items() if p.grad is not None}
    mean, detached = loss.reduce_mean().item(), loss.detach().reduce_mean().item()
    return {"grads": grads, "mean": mean, "detached": detached, "count": len(loss.outputs)}


# With a pipeline only the model's own backward can be called.
@pytest.mark.sample(keep=8)
@pytest.mark.parametrize(("pp", "plain_backward"), [(1, False), (1, True), (2, False)])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("samples", [2, 5, 7, 8])
def test_uneven_batches_give_the_gradients_of_the_mean_over_the_batch(
    pool: Pool, pp: int, dp: int, samples: int, plain_backward: bool
) -> None:
    run = Run(CASE, pp, dp, microbatches=4, dummies=True)
    results = pool.run(pp * dp, train_uneven, run, samples, plain_backward)
    plain = build(CASE, run.dtype)
    losses = []
    for replica in range(dp):
        batch = make_batch(CASE, run.dtype, replica, 0)
        loss = square_loss(plain, batch["x"][:samples])
        (loss / dp).backward()
        losses.append(loss.item())
    seen: set[str] = set()
    for result in results:
        assert result["count"] == min(4, samples)
        assert any(abs(result["mean"] - loss) < 1e-12 for loss in losses)
        assert result["mean"] == result["detached"]
        for name, grad in result["grads"].items():
            expected = plain.get_parameter(name).grad
            assert expected is not None and expected.abs().max() > 0
            error = (grad - expected).abs().max() / expected.abs().max()
            assert error < TOLERANCE[run.dtype], (name, error)
            seen.add(name)
    assert seen == {name for name, _ in plain.named_parameters()}


def sum_uneven(rank: int) -> dict[str, Any]:
    run = Run(
        CASE, 2, 1, microbatches=4, model_args=(("average_grads_across_microbatches", False),)
    )
    return train_uneven(rank, run, 7, False)


def test_sums_over_microbatches_are_not_weighted(pool: Pool) -> None:
    plain = build(CASE, torch.float64)
    for piece in torch.tensor_split(make_batch(CASE, torch.float64, 0, 0)["x"][:7], 4):
        square_loss(plain, piece).backward()
    for result in pool.run(2, sum_uneven):
        for name, grad in result["grads"].items():
            assert torch.allclose(grad, plain.get_parameter(name).grad, rtol=1e-12), name
