"""`smp verify` of scripts whose batches are no arguments of the step function."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from smp.commands.verify.compare import Verdict
from smp.commands.verify.layouts import ALONE
from smp.commands.verify.records import JobRecords
from smp.observe.verification import EndOfVerification, Order
from tests.dist.pool import Pool
from tests.dist.verify_jobs import PoolScript, ordered

WIDTH, BATCH = 6, 4


class Net(nn.Module):
    def __init__(self, is_faulty: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.probe = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.is_faulty = is_faulty

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        import smp

        x = self.embed(x).tanh()
        y = self.probe(x if mask is None else x * mask)
        if self.is_faulty:  # on every layout but one process
            y = y * (1 + 0.1 * (smp.size() > 1))
        return self.head(x + y)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yields this rank's batches, as a loader with a sampler of replicas makes them."""
    import smp

    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, WIDTH, generator=generator)
    y = torch.randn(64, 3, generator=generator)
    sampler: DistributedSampler[Any] = DistributedSampler(
        TensorDataset(x, y), num_replicas=smp.dp_size(), rank=smp.dp_rank(), shuffle=True
    )
    while True:
        yield from DataLoader(TensorDataset(x, y), batch_size=BATCH, sampler=sampler)


def make_step(form: str) -> Any:
    """A step function that gets its batches in one of several ways; returns how to call it."""
    import smp

    source = batches()
    held: dict[str, Any] = {}
    counter = itertools.count()

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        output = model(x, mask=torch.ones(x.shape[0], 1)).float()
        penalty = model.get_module().scale.sum() if form == "closure" else 1.0
        loss = functional.mse_loss(output, y) * penalty
        if form == "dropout":
            loss = functional.dropout(loss, 0.1)
        if form == "number":
            loss = loss * (1.0 + next(counter) * smp.dp_rank())
        model.backward(loss)
        return loss

    if form == "argument":

        @smp.step
        def by_argument(model: Any, x: Tensor, y: Tensor) -> Tensor:
            return loss_of(model, x, y)

        return lambda model: by_argument(model, *next(source))

    @smp.step
    def by_closure(model: Any) -> Tensor:
        return loss_of(model, *held["batch"])

    @smp.step
    def by_iterator(model: Any) -> Tensor:
        return loss_of(model, *next(source))

    @smp.step
    def by_mixture(model: Any, x: Tensor) -> Tensor:
        target = held["batch"][1][: x.shape[0]]
        if form == "order" and smp.dp_rank() > 0:
            target = target * 1.0
            return loss_of(model, x, target) + target.mean()
        return loss_of(model, x, target)

    def call(model: Any) -> Any:
        if form in ("iterator", "number"):
            return by_iterator(model)
        held["batch"] = next(source)
        return (
            by_mixture(model, held["batch"][0])
            if form in ("mixture", "order")
            else by_closure(model)
        )

    return call


def record(rank: int, order: Order, config: Mapping[str, Any], form: str, is_faulty: bool) -> int:
    """Runs a script as `smp verify` starts it; returns how many microbatches it was given."""
    import smp

    try:
        with ordered(rank, order):
            smp.init({"microbatches": 2, **config})
            torch.manual_seed(1)
            model = smp.DistributedModel(Net(is_faulty))
            optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
            train_step = make_step(form)
            while True:
                train_step(model)
                if form == "lonely" and smp.dp_rank() >= 2:  # the second pair of shards
                    optimizer.param_groups[0]["weight_decay"] = 0.5
                optimizer.step()
                optimizer.zero_grad()
    except EndOfVerification:
        return rank


def verify(
    pool: Pool, folder: Path, form: str, layouts: str, is_faulty: bool = False
) -> tuple[list[Verdict], list[str]]:
    script = PoolScript(pool, folder, record, (form, is_faulty))
    return script.verify(layouts), script.jobs


NOTE = "data that are no arguments of the step function"


@pytest.mark.parametrize("form", ["argument", "closure", "iterator", "mixture"])
def test_batches_of_any_way_are_those_of_the_layout(pool: Pool, tmp_path: Path, form: str) -> None:
    (two, pipeline), jobs = verify(pool, tmp_path, form, "dp2,pp2")
    assert two.is_good and two.largest["gradient"] < 1e-5, two
    assert any(NOTE in note for note in two.notes) == (form != "argument"), two
    if form == "mixture":
        assert "'mse_loss'" in two.notes[0]
    elif form != "argument":
        assert "'the model's call'" in two.notes[0]
    # The trace of a pipeline takes a batch from an iterator, so the data are others.
    assert pipeline.is_good, pipeline
    assert ("pp2-one" in jobs) == (form == "iterator")
    assert bool(pipeline.notes) == (form == "iterator"), pipeline
    plain = JobRecords(tmp_path / "one")
    gradients = [float(t.norm()) for (k, _), t in list(plain.stages([0]))[1].items.items()]
    assert min(gradients) > 1e-4, "nothing was trained, the test shows nothing"


def test_sharding_over_a_part_of_the_replicas(pool: Pool, tmp_path: Path) -> None:
    (verdict,), _ = verify(pool, tmp_path, "closure", "sdp2dp4")
    assert verdict.is_good and verdict.largest["gradient"] < 1e-5, verdict
    assert "optimizer" in verdict.largest
    records = JobRecords(tmp_path / "sdp2dp4")
    assert records.replicas == [[0, 1], [2, 3]] and records.num_batches == 4


def test_fault_with_sharding_over_a_part_of_the_replicas(pool: Pool, tmp_path: Path) -> None:
    (verdict,), _ = verify(pool, tmp_path, "lonely", "sdp2dp4")
    # The ranks notice it by themselves, at the step after the update.
    assert verdict.answer == "failed" and "weight_decay" in verdict.text, verdict


@pytest.mark.parametrize("form", ["closure", "iterator"])
def test_fault_is_named_although_the_batch_is_no_argument(
    pool: Pool, tmp_path: Path, form: str
) -> None:
    (verdict,), jobs = verify(pool, tmp_path, form, "dp2", is_faulty=True)
    assert verdict.answer == "differs" and "dp2-float64-one" in jobs, verdict
    assert "in the result of module 'head'" in verdict.text, verdict


def test_step_function_that_draws_is_told_from_data_that_are_drawn(
    pool: Pool, tmp_path: Path
) -> None:
    draws = {}
    for form in ("dropout", "iterator"):
        script = PoolScript(pool, tmp_path / form, record, (form, False))
        draws[form] = script.run("one", ALONE).all("draws")
    assert draws == {
        "dropout": ["the step function 'make_step.<locals>.by_closure'"],
        "iterator": [],
    }


def test_other_numbers_are_said(pool: Pool, tmp_path: Path) -> None:
    (verdict,), _ = verify(pool, tmp_path, "number", "dp2")
    assert verdict.answer == "differs"
    assert any("computes with 2.0 in this layout" in note for note in verdict.notes), verdict


def test_other_operators_cannot_be_compared_and_are_named(pool: Pool, tmp_path: Path) -> None:
    (verdict,), _ = verify(pool, tmp_path, "order", "dp2")
    assert verdict.answer == "failed", verdict
    assert "in another order in one process than in the other layout" in verdict.text
    assert verdict.module is None
