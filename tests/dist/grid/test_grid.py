"""Parallelism, sharding, precision, checkpointing and offload in all combinations.

Every legal cell trains a small GPT-J like one process of the same precision, every other one is
refused. ``SMP_GRID=all`` runs all of them; else a sample in which any three choices that can meet
do so. ``SMP_GRID_SEED`` makes another sample.
"""

from __future__ import annotations

import os

import pytest

from tests.dist.grid.cells import ILLEGAL, LEGAL, Cell, row_of
from tests.dist.grid.covering import covering_sample
from tests.dist.grid.judging import check
from tests.dist.grid.training import refusal_of, train_cell
from tests.dist.pool import Pool

SEED = int(os.environ.get("SMP_GRID_SEED", "1"))
RUNS_ALL = os.environ.get("SMP_GRID") == "all"


def cells_to_run() -> list[Cell]:
    """Small worlds first."""
    if RUNS_ALL:
        cells = list(LEGAL)
    else:
        sample = covering_sample([row_of(cell) for cell in LEGAL], 3, SEED)
        cells = [Cell(*row) for row in sample]
    return sorted(cells, key=lambda cell: (cell.world_size, str(cell)))


@pytest.mark.parametrize("cell", cells_to_run(), ids=lambda cell: f"seed{SEED}-{cell}")
def test_cell_trains_like_one_process(pool: Pool, cell: Cell) -> None:
    check(cell, pool.run(cell.world_size, train_cell, cell, timeout=120))


def test_every_other_cell_is_refused(pool: Pool) -> None:
    for world_size in sorted({cell.world_size for cell in ILLEGAL}):
        cells = [cell for cell in ILLEGAL if cell.world_size == world_size]
        for texts in pool.run(world_size, refusal_of, cells, timeout=120):
            assert texts == [cell.error for cell in cells]
