"""Checkpointing and offloading: less memory, more forwards, and the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.dist.checkpoint_training import Cell, Record, check_equal, train_all
from tests.dist.pool import WITHOUT_CHECKS, Pool
from tests.dist.sharded_training import SHARDED
from tests.harness import train_step_of

NUM_BLOCKS, STEPS = 6, 2
STRATEGIES = ("each", "contiguous", "group_2")


def run(pool: Pool, cells: list[Cell], timeout: float = 120) -> list[list[Record]]:
    """Records by rank and cell, equal where they must be."""
    results = pool.run(cells[0].world_size, train_all, cells, timeout=timeout, env=WITHOUT_CHECKS)
    check_equal(cells, results)
    return results


def total(results: list[list[Record]], index: int, name: str) -> list[int]:
    """A count over all ranks, by step."""
    by_rank = [getattr(records[index], name) for records in results]
    return [sum(counts) for counts in zip(*by_rank, strict=True)]


def check_counts(cells: list[Cell], results: list[list[Record]], num_blocks: int) -> None:
    """Checks that each forward of a checkpointed block runs once more, in backward."""
    for index, cell in enumerate(cells):
        once = num_blocks * cell.microbatches * cell.dp
        again = once if cell.strategy else 0
        # The trace of an automatic partition is not counted: these are manual.
        assert total(results, index, "recomputed") == [again] * cell.steps, cell
        assert total(results, index, "runs") == [once + again] * cell.steps, cell


def check_offload(cells: list[Cell], results: list[list[Record]]) -> None:
    for index, cell in enumerate(cells):
        for records in results:
            stats = records[index].offload
            assert bool(stats) == cell.offload
            if cell.offload:
                assert stats["offloaded"] > 0 and stats["loaded_ahead"] > 0, (cell, stats)
                assert stats["slots_in_use"] == 0 < stats["peak_slots_in_use"], (cell, stats)
                assert stats["slots"] == stats["peak_slots_in_use"] < stats["offloaded"]
        stayed = [records[index].offload.get("stayed", 0) for records in results]
        # With the simple schedule the first microbatch is the first to go back. With others the
        # last stage needs some at once, unless ranks were late in the step that the plan is of.
        if not cell.offload or cell.schedule == "simple":
            assert not any(stayed), f"{cell}: {stayed} were needed at once"
        elif cell.pp == 1:
            assert any(stayed), f"{cell}: none was needed at once"


def variants(cell: Cell, strategies: tuple[str, ...] = STRATEGIES) -> list[Cell]:
    """Returns the cell, copies with each strategy, and a copy that also offloads."""
    cells = [cell, *(replace(cell, strategy=strategy) for strategy in strategies)]
    return [*cells, replace(cell, strategy=strategies[0], offload=True)]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_alone(pool: Pool, microbatches: int) -> None:
    cells = variants(Cell(microbatches=microbatches))
    results = run(pool, cells)
    check_counts(cells, results, NUM_BLOCKS)
    check_offload(cells, results)


def test_data_parallel(pool: Pool) -> None:
    cells = variants(Cell(dp=2), ("each",))
    results = run(pool, cells)
    check_counts(cells, results, NUM_BLOCKS)
    check_offload(cells, results)


@pytest.mark.parametrize("schedule", ["interleaved", "simple", "zero_bubble"])
def test_pipeline(pool: Pool, schedule: str) -> None:
    cells = variants(Cell(pp=2, schedule=schedule))
    results = run(pool, cells)
    check_counts(cells, results, NUM_BLOCKS)
    check_offload(cells, results)


def test_pipeline_with_and_without_virtual_stages(pool: Pool) -> None:
    plain = Cell(pp=2, steps=4)
    virtual = Cell(
        pp=2, schedule="virtual_interleaved", manual=False, config=(("skip_tracing", True),)
    )
    cells = variants(plain, ("each", "group_2")) + variants(virtual, ("each", "contiguous"))
    results = run(pool, cells)
    check_counts(cells, results, NUM_BLOCKS)


@pytest.mark.parametrize("pp", [1, 2])
def test_any_structure_of_arguments(pool: Pool, pp: int) -> None:
    cells = variants(Cell("structures", pp=pp), ("each",))
    check_counts(cells, run(pool, cells), 4)


def test_tensor_parallel(pool: Pool) -> None:
    cells = variants(Cell("split", tp=2, microbatches=2))
    run(pool, [*cells, replace(cells[0], strategy="enable")])


def test_tensor_and_pipeline_parallel(pool: Pool) -> None:
    cells = variants(Cell("split", pp=2, tp=2, microbatches=2), ("group_2", "each"))
    run(pool, [*cells, replace(cells[0], strategy="enable")])


@pytest.mark.parametrize("kind", ["gptj", "bert"])
def test_hugging_face_switch(pool: Pool, kind: str) -> None:
    for layout in (Cell(kind), Cell(kind, pp=2), Cell(kind, tp=2)):
        cell = replace(layout, microbatches=2)
        results = run(
            pool,
            [
                cell,
                replace(cell, strategy="enable", offload=True),
                replace(cell, strategy="each", offload=True),
            ],
        )
        for records in results:  # 4 layers
            layers_here = 4 // cell.pp
            for record in records[1:]:
                assert record.offload["checkpoints"] == layers_here * cell.microbatches * cell.steps


@pytest.mark.parametrize("pp", [1, 2])
def test_hugging_face_switch_of_older_releases(pool: Pool, pp: int) -> None:
    cell = Cell("older", pp=pp)
    cells = [cell, replace(cell, strategy="enable", offload=True)]
    results = run(pool, cells)
    check_counts(cells, results, 4)
    for records in results:
        assert records[1].offload["checkpoints"] == 4 // pp * cell.microbatches * cell.steps


@pytest.mark.parametrize(("kind", "pp", "tp"), [("", 1, 1), ("", 2, 1), ("split ", 1, 2)])
def test_functions_under_the_checkpointing_of_pytorch(
    pool: Pool, kind: str, pp: int, tp: int
) -> None:
    cell = Cell(f"{kind}functions", pp=pp, tp=tp)
    cells = [cell, replace(cell, strategy="torch")]
    results = run(pool, cells)
    assert total(results, 1, "runs") > total(results, 0, "runs")


def test_budget(pool: Pool) -> None:
    for pp in (1, 2):
        cell = Cell(pp=pp, microbatches=2)
        roomy, tight = (replace(cell, strategy=f"budget:{gib}") for gib in (1, 0))
        results = run(pool, [cell, roomy, tight])
        once = NUM_BLOCKS * cell.microbatches
        assert total(results, 1, "recomputed") == [once, 0]
        assert total(results, 2, "recomputed") == [once] * STEPS


def measured_bytes(rank: int, degree: int) -> list[tuple[int, int]]:
    """Returns the bytes that a budget has measured of each layer: all kept ones, and arguments."""
    import torch
    from torch import nn

    import smp
    from smp.activations import budget

    smp.init({"ddp": True, "sharded_data_parallel_degree": degree, **SHARDED})
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(3)]
    model = smp.DistributedModel(nn.Sequential(*layers))
    smp.set_activation_checkpointing(model.get_module(), strategy="budget:0")
    costs: list[tuple[int, int]] = []
    measure = budget.measure

    def noting(*args: Any) -> Any:
        result, cost = measure(*args)
        costs.append((cost.kept_bytes, cost.argument_bytes))
        return result, cost

    train_step = train_step_of(model)
    try:
        budget.measure = noting
        train_step(torch.randn(8, 64))
    finally:
        budget.measure = measure
    return costs


def test_a_budget_does_not_count_gathered_weights(pool: Pool) -> None:
    one = 8 * 64 * 4
    for degree in (1, 2):
        for costs in pool.run(2, measured_bytes, degree, env=WITHOUT_CHECKS):
            assert costs == [(2 * one, one)] * 3, degree


def offload_warnings(rank: int, asks: str) -> int:
    """Warnings of this rank in a pipeline whose second stage has all checkpoints, if any."""
    import logging

    import torch
    from torch import Tensor, nn

    import smp
    from smp.activations.checkpointing import checkpoint

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x) if asks == "owner" else self.block(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), Stage()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return checkpoint(self.second, x) if asks == "caller" else self.second(x)

    smp.init(
        {"pipeline_parallel_degree": 2, "offload_activations": True, "auto_partition": False,
         "default_partition": 0, "microbatches": 2}
    )  # fmt: skip
    net = Net()
    smp.set_partition(net.second, 1)
    model = smp.DistributedModel(net)
    train_step = train_step_of(model, lambda model, x: model(x).sum())
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("smp")
    logger.addHandler(handler)
    try:
        train_step(torch.ones(4, 4))
        train_step(torch.ones(4, 4))
    finally:
        logger.removeHandler(handler)
    if asks:  # the other rank has them
        assert (smp.metrics.offload_stats()["checkpoints"] > 0) == (smp.pp_rank() == 1)
    return sum("offload_activations has no effect" in message for message in messages)


@pytest.mark.parametrize("asks", ["caller", "owner", ""])
def test_offloading_on_a_later_stage_is_no_reason_to_warn(pool: Pool, asks: str) -> None:
    assert pool.run(2, offload_warnings, asks) == [0 if asks else 1, 0]


def test_automatic_partition_traces_marked_modules(pool: Pool) -> None:
    cells = [Cell(pp=2, manual=False, strategy=strategy) for strategy in ("each", "contiguous")]
    results = pool.run(2, train_all, cells, env=WITHOUT_CHECKS)
    for index, cell in enumerate(cells):
        # The first step has the trace, which runs blocks once more.
        again = NUM_BLOCKS * cell.microbatches
        assert total(results, index, "recomputed")[1] == again
        assert total(results, index, "runs")[1] == 2 * again
