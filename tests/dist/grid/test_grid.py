"""Parallelism, sharding, precision, checkpointing and offload in all combinations.

Every legal cell trains a small GPT-J like one process of the same precision, every other one is
refused. ``SMP_GRID=all`` runs all of them; else a sample in which any three choices that can meet
do so. ``SMP_GRID_SEED`` makes another sample; the head of the report and each name have it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.dist.grid.cells import ILLEGAL, LEGAL, Cell, row_of
from tests.dist.grid.covering import covering_sample
from tests.dist.grid.judging import check
from tests.dist.grid.training import GridRecord, Part, refusal_of, train_cell
from tests.dist.pool import Pool

SEED = int(os.environ["SMP_GRID_SEED"])
RUNS_ALL = os.environ.get("SMP_GRID") == "all"


def cells_to_run() -> list[Cell]:
    """Small worlds first."""
    if RUNS_ALL:
        cells = list(LEGAL)
    else:
        sample = covering_sample([row_of(cell) for cell in LEGAL], 3, SEED)
        cells = [Cell(*row) for row in sample]
    return sorted(cells, key=lambda cell: (cell.world_size, str(cell)))


@pytest.mark.sample(keep=9)
@pytest.mark.parametrize("cell", cells_to_run(), ids=lambda cell: f"seed{SEED}-{cell}")
def test_cell_trains_like_one_process(pool: Pool, cell: Cell) -> None:
    check(cell, pool.run(cell.world_size, train_cell, cell))


def test_every_other_cell_is_refused(pool: Pool) -> None:
    for world_size in sorted({cell.world_size for cell in ILLEGAL}):
        cells = [cell for cell in ILLEGAL if cell.world_size == world_size]
        for texts in pool.run(world_size, refusal_of, cells):
            assert texts == [cell.error for cell in cells]


def scale_gradient(records: list[GridRecord]) -> None:
    for record in records:
        change(record.grads[1], "transformer.seq_layers.3.", 1.001)


def scale_master(records: list[GridRecord]) -> None:
    for record in records:
        change(record.masters, "word_embedding", 1.01)
        change(record.model, "word_embedding", 1.01)


def scale_one_replica(records: list[GridRecord]) -> None:
    change(records[1].masters, "word_embedding", 1 + 1e-6)


def let_model_fall_behind(records: list[GridRecord]) -> None:
    change(records[1].model, "word_embedding", 1 + 1e-6)


def lose_a_loss(records: list[GridRecord]) -> None:
    records[0].losses[2][1] *= 1.0001


def keep_a_parameter(records: list[GridRecord]) -> None:
    records[0].unchanged[1].append("word_embedding.weight")


def forget_a_recomputation(records: list[GridRecord]) -> None:
    records[0].forwards[2] += 1


def change(parts: dict[str, Part], start: str, factor: float) -> None:
    name = next(name for name in parts if name.startswith(start))
    parts[name] = replace(parts[name], values=parts[name].values * torch.tensor(factor))


TAMPERINGS = {
    scale_gradient: "gradient of",
    scale_master: "changes of parameters",
    scale_one_replica: "replicas differ",
    let_model_fall_behind: "is not its rounded master",
    lose_a_loss: "losses of step 2",
    keep_a_parameter: "step 1 left",
    forget_a_recomputation: "forwards of blocks in step 2",
}


def test_what_goes_wrong_is_noticed(pool: Pool) -> None:
    cell = Cell(1, 1, 2, "none", "fp32", "none", False)
    records: list[GridRecord] = pool.run(2, train_cell, cell)
    check(cell, records)
    tamper: Callable[[list[GridRecord]], None]
    for tamper, message in TAMPERINGS.items():
        wrong = copy.deepcopy(records)
        tamper(wrong)
        with pytest.raises(AssertionError, match=message):
            check(cell, wrong)
