"""Microbatches that take another way than the ones before, with random delays: the same bits."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp.metrics import difference, server_stats
from tests.dist.pool import Pool
from tests.dist.training import assert_bitwise_equal, local_parameters
from tests.harness import train_step_of


@dataclass
class Record:
    """Records what one rank saw, by step."""

    losses: list[list[float]] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)  # local parameters
    traffic: list[dict[str, float]] = field(default_factory=list)
    counts: list[float] = field(
        default_factory=list
    )  # calls of blocks: none twice, none for nothing


def assert_same(expected: list[Record], records: list[Record]) -> None:
    for rank, (ours, theirs) in enumerate(zip(records, expected, strict=True)):
        assert ours.losses == theirs.losses, f"rank {rank}"
        assert ours.counts == theirs.counts, f"rank {rank}"
        for step, (left, right) in enumerate(zip(ours.grads, theirs.grads, strict=True)):
            assert_bitwise_equal(left, right, f"rank {rank}, gradients of step {step}")


def note(record: Record, model: nn.Module, losses: list[Tensor], before: Any) -> None:
    record.losses.append([loss.item() for loss in losses])
    record.grads.append(
        {
            name: None if p.grad is None else p.grad.clone()
            for name, p in local_parameters(model).items()
        }
    )
    record.traffic.append(difference(server_stats(), before))
    model.zero_grad(set_to_none=True)


WIDTH = 24
PATHS = ("branch", "layerdrop", "order", "shape", "eval", "frozen")
STEADY = "steady"
AFTER = "steady, after a deviation"
PLAN = (STEADY, STEADY, STEADY, *(name for path in PATHS for name in (path, AFTER, STEADY)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.is_broken = False

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.is_broken:
            raise ArithmeticError("broken")
        y: Tensor = self.dropout(torch.tanh(self.first(x)))
        return x + y


class Deviating(nn.Module):
    """A chain whose third microbatch takes another way in some steps."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.extra = Block()
        self.head = nn.Linear(WIDTH, 3, dtype=torch.float64)

    def forward(self, x: Tensor, path: str, deviates: bool) -> Tensor:
        blocks = list(self.blocks)
        if path == "order" and deviates:
            blocks[1], blocks[-1] = blocks[-1], blocks[1]
        for i, block in enumerate(blocks):
            if path == "layerdrop" and deviates and i == len(blocks) // 2:
                continue
            x = block(x)
            if path == "branch" and i == len(blocks) // 2 and x.detach().mean() > -1e3:
                x = self.extra(x) if deviates else x * 1.5
        y: Tensor = self.head(x)
        return y.square().mean()


def train_deviating(rank: int, pp: int, static: bool, delays: int) -> Record:
    import smp
    import smp_testing

    smp.init(
        {
            "pipeline_parallel_degree": pp,
            "microbatches": 4,
            "auto_partition": False,
            "default_partition": 0,
            "static_mode": static,
        }
    )
    smp_testing.set_delays(7, delays)
    try:
        return _train_deviating(pp, smp)
    finally:
        smp_testing.set_delays(0, 0)
        smp.shutdown()


def _train_deviating(pp: int, smp: Any) -> Record:
    torch.manual_seed(3)
    plain = Deviating(3 * pp)
    for i, block in enumerate(plain.blocks):
        smp.set_partition(block, i // 3)
    smp.set_partition(plain.extra, pp - 1)
    smp.set_partition(plain.head, pp - 1)
    model = smp.DistributedModel(plain)
    frozen = plain.blocks[-1].first.weight  # type: ignore[union-attr]

    @smp.step
    def step(x: Tensor, numbers: Tensor, path: str) -> Tensor:
        loss: Tensor = model(x, path, bool(numbers[0] == 2))
        model.backward(loss)
        return loss

    record = Record()
    for i, path in enumerate(PLAN):
        generator = torch.Generator().manual_seed(i)
        rows = 16 if path == "shape" else 32
        x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        numbers = torch.arange(4).repeat_interleave(rows // 4)
        model.train(path != "eval")
        frozen.requires_grad_(path != "frozen")
        before = server_stats()
        note(record, model, step(x, numbers, path).outputs, before)
    record.counts = [block.count.item() for block in [*plain.blocks, plain.extra]]  # type: ignore
    assert sum(record.counts) > 0
    return record


@pytest.mark.parametrize("pp", [2, 4])
def test_deviations_change_no_bit_whatever_is_late(pool: Pool, pp: int) -> None:
    expected = pool.run(pp, train_deviating, pp, False, 0)
    late = pool.run(pp, train_deviating, pp, True, 400)
    assert_same(expected, late)
    for ours, theirs in zip(late[0].traffic, expected[0].traffic, strict=True):
        assert ours["remote_calls"] == theirs["remote_calls"] > 0
    steady = [t["pushes"] for t, path in zip(late[0].traffic, PLAN, strict=True) if path == STEADY]
    assert steady[2:] == [0] * len(steady[2:]), "results go their way without orders"


def fail_in_step(rank: int, pp: int) -> None:
    import smp

    smp.init(
        {
            "pipeline_parallel_degree": pp,
            "microbatches": 4,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    plain = Deviating(2 * pp)
    for i, block in enumerate(plain.blocks):
        smp.set_partition(block, i // 2)
    smp.set_partition(plain.head, pp - 1)
    smp.set_partition(plain.extra, pp - 1)
    model = smp.DistributedModel(plain)
    step = train_step_of(model, lambda model, x: model(x, STEADY, False))
    x = torch.randn(16, WIDTH, dtype=torch.float64)
    for _ in range(3):
        step(x)
    if rank == pp - 1:
        plain.blocks[-1].is_broken = True  # type: ignore[assignment]
    step(x)


@pytest.mark.parametrize("pp", [2, 4])
def test_an_exception_in_a_module_that_is_known_is_raised_on_all_ranks(pool: Pool, pp: int) -> None:
    outcomes = pool.outcomes(pp, fail_in_step, pp)
    assert outcomes[-1].error == "ArithmeticError", outcomes[-1].traceback
    for outcome in outcomes[:-1]:
        assert "PeerFailure" in outcome.bases, outcome.traceback
        assert re.search(rf"blocks\.{2 * pp - 1}", outcome.message), outcome.traceback
