"""Rules for the boundary between ranks: each rule gives the numbers of one process.

The rules are the modules of `tests/reference/boundary.py` and `boundary_values.py`; they also hold
assertions of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool, RankFailure
from tests.dist.programs.running import Record, compare, grads_of, join
from tests.harness import own_loss, train_step_of
from tests.reference import boundary, boundary_values
from tests.reference.boundary import WIDTH, Rule
from tests.reference.models import nowhere, randomise_
from tests.reference.single_process import make_optimizer
from tests.reference.tolerances import assert_close, relative_difference

RULES = [
    rule.__name__
    for module in (boundary, boundary_values)
    for rule in vars(module).values()
    if isinstance(rule, type) and issubclass(rule, Rule) and rule is not Rule
    if rule.__module__ == module.__name__
]
# Modules whose results share memory with something else may be refused.
REFUSABLE = {"ResultThatIsAViewOfAnArgument", "ResultsThatShareMemory"}
REFUSABLE |= {"ContainerThatTheCalleeFills"}
MICROBATCHES = 3


def make(rule: str, place: Any = nowhere) -> nn.Module:
    built = getattr(boundary, rule, None) or getattr(boundary_values, rule)
    return randomise_(built(place), 3).train()


def batch(step: int, dp_rank: int, rows: int | None = None) -> Tensor:
    """Another number of rows in each step."""
    generator = torch.Generator().manual_seed(10 * step + dp_rank)
    count = (2 + step) * MICROBATCHES if rows is None else rows
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)


def run_plain(rule: str, replicas: int = 1, steps: int = 3) -> Record:
    model = make(rule)
    optimizer = make_optimizer(model.parameters())
    record = Record()
    for step in range(steps):
        for replica in range(replicas):
            losses = []
            for x in batch(step, replica).chunk(MICROBATCHES):
                loss = model(x)
                (loss / (MICROBATCHES * replicas)).backward()
                losses.append(loss.item())
            if replica == 0:
                record.losses.append(losses)
        record.grads.append(grads_of(model.named_parameters()))
        optimizer.step()
        optimizer.zero_grad()
    record.params = {name: p.detach().clone() for name, p in model.named_parameters()}
    return record


def start(pp: int, dp: int, schedule: str = "interleaved") -> Any:
    """Initialises; returns the `place` of the rules."""
    import smp

    smp.init(
        {
            "pipeline_parallel_degree": pp,
            "microbatches": MICROBATCHES,
            "pipeline": schedule,
            "ddp": dp > 1,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    return smp.partition if pp > 1 else nowhere


@dataclass
class ReplicaRecord(Record):
    """Records what one rank saw of a run with several replicas."""

    dp_rank: int = 0


def run_distributed(rank: int, rule: str, pp: int, dp: int, schedule: str) -> ReplicaRecord:
    import smp

    model = smp.DistributedModel(make(rule, start(pp, dp, schedule)))
    optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))
    train = train_step_of(model, own_loss)
    record = ReplicaRecord(dp_rank=smp.dp_rank())
    for step in range(3):
        output = train(batch(step, smp.dp_rank()))
        record.losses.append([loss.item() for loss in output.outputs])
        record.grads.append(grads_of(model.local_named_parameters()))
        optimizer.step()
        optimizer.zero_grad()
    assert smp.metrics.server_stats()["records"] == 0, "calls are kept after the step"
    record.params = {n: p.detach().clone() for n, p in model.local_named_parameters()}
    return record


@pytest.mark.sample(keep=6)
@pytest.mark.parametrize("schedule", ["interleaved", "simple"])
@pytest.mark.parametrize("rule", RULES)
def test_rule_gives_the_numbers_of_one_process(pool: Pool, rule: str, schedule: str) -> None:
    expected = run_plain(rule)
    try:
        records = pool.run(2, run_distributed, rule, 2, 1, schedule)
    except RankFailure as error:
        if rule in REFUSABLE and ("ValueError" in str(error) or "RuntimeError" in str(error)):
            assert "module 'second'" in str(error), "a refusal names the module"
            return
        raise
    compare(records, expected)


@pytest.mark.parametrize("rule", ["UnusedOutputsAndArguments", "UsedBySomeMicrobatchesOnly"])
def test_buckets_do_not_wait_for_what_is_not_used(pool: Pool, rule: str) -> None:
    records = pool.run(4, run_distributed, rule, 2, 2, "interleaved")
    first = [record for record in records if record.dp_rank == 0]
    compare(first, run_plain(rule, replicas=2))
    params = [join([r for r in records if r.dp_rank == d]).params for d in (0, 1)]
    for name, value in params[0].items():
        assert torch.equal(value, params[1][name]), f"replicas have another {name}"


# ---- batches that microbatches do not divide ----------------------------------


def train_uneven(rank: int, rows: list[int], pp: int, dp: int) -> tuple[float, int, int, Any]:
    import smp

    model = smp.DistributedModel(make("SuperForward", start(pp, dp)))
    train = train_step_of(model, own_loss)
    for count in rows:
        model.zero_grad()
        output = train(batch(count, smp.dp_rank(), count))
    return (
        float(output.reduce_mean()),
        smp.dp_rank(),
        len(output.outputs),
        grads_of(model.local_named_parameters()),
    )


@pytest.mark.sample(keep=4)
@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize("rows", [[7], [6, 7, 8], [2], [9, 1]])
def test_batches_that_microbatches_do_not_divide_are_weighted_exactly(
    pool: Pool, rows: list[int], pp: int, dp: int
) -> None:
    """Loss and gradients are those of the mean over the batch in one piece."""
    results = pool.run(pp * dp, train_uneven, rows, pp, dp)
    model = make("SuperForward")
    losses = [model(batch(rows[-1], replica, rows[-1])) for replica in range(dp)]
    torch.stack(losses).mean().backward()
    grads: dict[str, Tensor | None] = {}
    for loss, replica, count, part in results:
        expected = losses[replica].detach()
        got = torch.tensor(loss, dtype=torch.float64)
        assert relative_difference(got, expected) <= 1e-10
        assert count == min(MICROBATCHES, rows[-1])
        grads.update(part)
    assert_close(grads, grads_of(model.named_parameters()), torch.float64, "gradients")


# ---- views -------------------------------------------------------------------------

#: Pieces of a result of ``[rows, WIDTH]`` that another module takes.
VIEWS_AS_RECIPES: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "t": lambda y: [y.t().t(), torch.t(y).mT],
    "chunk": lambda y: y.chunk(2),
    "split": lambda y: [*y.split(2), *torch.split(y, (1, y.shape[0] - 1), dim=0)],
    "tensor_split": lambda y: y.tensor_split(3, dim=0),
    "unbind": lambda y: [*y.unbind(), *torch.unbind(y.t(), 1)],
    "iteration": lambda y: list(y),
    "narrow": lambda y: [y.narrow(0, 1, 1), torch.narrow(y, 0, 0, 2)],
    "expand": lambda y: [y[:1].expand(3, -1), y[0].expand(2, WIDTH)],
    "unfold": lambda y: [y.unfold(0, 2, 1).transpose(1, 2)],
    "movedim": lambda y: [y.movedim(0, 1).swapaxes(0, 1), torch.permute(y, (0, 1))],
    "diagonal": lambda y: [y[:WIDTH, :WIDTH].diagonal().expand(2, WIDTH)],
}


class Viewed(nn.Module):
    """Two modules of another rank, and between them the code of this one."""

    def __init__(self, views: str, place: Any) -> None:
        super().__init__()
        self.views = views
        with place(1):
            self.first, self.second = boundary.Away(), boundary.Away()

    def forward(self, x: Tensor) -> Tensor:
        pieces = VIEWS_AS_RECIPES[self.views](self.first(x))
        means = [self.second(piece).tanh().mean() for piece in pieces]
        return functools.reduce(torch.add, means)


def train_viewed(rank: int, views: str) -> tuple[float, Any, float]:
    import smp

    model = smp.DistributedModel(randomise_(Viewed(views, start(2, 1)), 3))
    train = train_step_of(model, own_loss)
    for _ in range(4):
        model.zero_grad()
        before = smp.metrics.server_stats()
        output = train(batch(0, 0, 4 * MICROBATCHES))
    sent = smp.metrics.difference(smp.metrics.server_stats(), before)["data_bytes"]
    return float(output.reduce_mean()), grads_of(model.local_named_parameters()), sent


@pytest.mark.parametrize("views", VIEWS_AS_RECIPES)
def test_views_of_results_are_made_where_they_are_read(pool: Pool, views: str) -> None:
    model = randomise_(Viewed(views, nowhere), 3)
    losses = [model(x) for x in batch(0, 0, 4 * MICROBATCHES).chunk(MICROBATCHES)]
    mean = torch.stack(losses).mean()
    mean.backward()
    results = pool.run(2, train_viewed, views)
    grads: dict[str, Tensor | None] = {}
    for loss, part, _ in results:
        assert loss == pytest.approx(mean.item(), rel=1e-12)
        grads.update(part)
    assert_close(grads, grads_of(model.named_parameters()), torch.float64, "gradients")
    assert results[1][2] <= 64 * MICROBATCHES, "only losses come to the driver"


# ---- the output of the model in the step function -------------------------------


class Pair(Rule):
    """Returns tensors of which the step function changes some in place."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.first(x)
        return {"a": self.second(y), "b": (y, None), "n": (y * 2).detach()}


def change_outputs(rank: int) -> tuple[list[float], Any]:
    import smp

    model = smp.DistributedModel(randomise_(Pair(start(2, 1)), 3))
    train = train_step_of(model, lambda model, x: loss_of_pair(model(x), x))
    output = train(batch(0, 0))
    return [loss.item() for loss in output.outputs], grads_of(model.local_named_parameters())


def loss_of_pair(output: dict[str, Any], x: Tensor) -> Tensor:
    a, (b, _) = output["a"], output["b"]
    a /= 2
    a += x
    a[:, 1:] *= 3
    output["n"].zero_()
    return a.sin().mean() + b.sum() / 7


def test_outputs_of_the_model_may_be_changed_in_place_on_every_rank(pool: Pool) -> None:
    model = randomise_(Pair(nowhere), 3)
    losses = []
    for x in batch(0, 0).chunk(MICROBATCHES):
        loss = loss_of_pair(model(x), x)
        (loss / MICROBATCHES).backward()
        losses.append(loss.item())
    results = pool.run(2, change_outputs)
    grads: dict[str, Tensor | None] = {}
    for got, part in results:
        assert got == pytest.approx(losses, rel=1e-12)
        grads.update(part)
    assert_close(grads, grads_of(model.named_parameters()), torch.float64, "gradients")


# ---- two models -------------------------------------------------------------------


def train_two(rank: int, pp: int) -> tuple[Any, Any, str]:
    import smp

    place = start(pp, 2 // pp)
    models = [
        smp.DistributedModel(make(rule, place))
        for rule in ("SuperForward", "SeveralOutputsThatNeedGradients")
    ]
    optimizers = [smp.DistributedOptimizer(make_optimizer(m.parameters())) for m in models]

    @smp.step
    def train(x: Tensor) -> Tensor:
        losses = [model(x) for model in models]
        for model, loss in zip(models, losses, strict=True):
            model.backward(loss)
        return losses[0] + losses[1]

    for step in range(2):
        train(batch(step, 0))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    try:
        smp.explain_partition()
        text = "no error"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return (
        *({n: p.detach().clone() for n, p in m.local_named_parameters()} for m in models),
        text,
    )


@pytest.mark.parametrize("pp", [1, 2])
def test_two_models_train_side_by_side_and_calls_that_name_none_list_them(
    pool: Pool, pp: int
) -> None:
    results = pool.run(2, train_two, pp)
    for index, rule in enumerate(("SuperForward", "SeveralOutputsThatNeedGradients")):
        merged: dict[str, Tensor | None] = {}
        for result in results:
            merged.update(result[index])
        expected = run_plain(rule, steps=2).params
        assert_close(merged, expected, torch.float64, f"parameters of {rule}")
    for result in results:
        assert "RuntimeError" in result[2], result[2]
        assert "SuperForward" in result[2] and "SeveralOutputs" in result[2], result[2]
