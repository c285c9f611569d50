"""The sample of the grid shows every three choices together that can meet."""

from __future__ import annotations

import itertools
import os

import pytest

from tests.dist.grid.cells import CELLS, ILLEGAL, LEGAL, Cell, row_of
from tests.dist.grid.covering import combinations_of, covering_sample
from tests.samples import SAMPLES, SHARE


def test_every_triple_of_a_legal_cell_is_in_the_sample() -> None:
    rows = [row_of(cell) for cell in LEGAL]
    wanted = set().union(*(combinations_of(row, 3) for row in rows))
    for seed in range(5):
        sample = covering_sample(rows, 3, seed)
        assert set(sample) <= set(rows) and len(set(sample)) == len(sample)
        assert set().union(*(combinations_of(row, 3) for row in sample)) == wanted
        assert len(sample) < len(rows) / 6


def test_a_sample_depends_on_the_seed_alone() -> None:
    rows = [row_of(cell) for cell in LEGAL]
    assert covering_sample(rows, 3, 1) == covering_sample(rows, 3, 1)
    assert covering_sample(rows, 3, 1) != covering_sample(rows, 3, 2)


def test_what_cannot_meet_is_not_asked_for() -> None:
    rows = [row for row in itertools.product((0, 1), repeat=4) if not (row[0] and row[1])]
    sample = covering_sample(rows, 2, 0)
    shown = set().union(*(combinations_of(row, 2) for row in sample))
    assert ((0, 1), (1, 1)) not in shown
    assert len(shown) == 4 * 6 - 1
    assert len(sample) <= 8


def test_a_row_shows_all_choices_of_its_columns() -> None:
    assert combinations_of(("a", "b", "c"), 2) == {
        ((0, "a"), (1, "b")),
        ((0, "a"), (2, "c")),
        ((1, "b"), (2, "c")),
    }
    assert len(combinations_of(tuple(range(7)), 3)) == 35
    assert covering_sample([(1, 2)], 3, 0) == []


def test_the_grid_has_all_cells_and_refuses_shards_that_nobody_shares() -> None:
    assert len(CELLS) == len(set(CELLS)) == 432
    assert len(ILLEGAL) == 72 and len(LEGAL) == 360
    assert {(cell.sharding, cell.dp) for cell in ILLEGAL} == {("sdp2", 1)}


@pytest.mark.parametrize("cell", [CELLS[0], CELLS[-1]], ids=str)
def test_cells_read_well_and_come_back(cell: Cell) -> None:
    assert Cell(*row_of(cell)) == cell
    assert str(cell) in ("pp1-tp1-dp1-none-fp32-none-keep", "pp2-tp2-dp2-sdp2-bf16-group_2-offload")


@pytest.mark.covering(times=1)
@pytest.mark.parametrize("second", range(3))
@pytest.mark.parametrize("first", range(4))
def test_a_product_that_is_sampled(first: int, second: int) -> None:
    assert (first, second) in itertools.product(range(4), range(3))


@pytest.mark.skipif(SHARE != (1, 1), reason="SMP_SHARE=1/1 runs it")
@pytest.mark.sample
def test_marked_products_are_sampled(request: pytest.FixtureRequest) -> None:
    ran = [i for i in request.session.items if i.name.startswith("test_a_product_that_is_sampled[")]
    takes_all = os.environ.get("SMP_GRID") == "all" or "::" in "".join(request.config.args)
    assert len(ran) == (12 if takes_all else {"some": 1, "others": 3, "all": 4}[SAMPLES])
