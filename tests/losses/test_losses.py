"""Losses are those of the plain script on the whole batch, or smp warns that they are not."""

from __future__ import annotations

import pytest

from tests.dist.pool import Pool
from tests.losses.__main__ import chosen, expected, line
from tests.losses.case import EQUAL, EQUAL_WARNED, REFUSED, WARNED
from tests.losses.catalogue import CASES
from tests.losses.running import LAYOUTS, Result, run

ROWS = chosen(list(CASES))
NAMES = [f"{name} (weight)" if has_weight else name for name, has_weight in ROWS]


@pytest.fixture(scope="session")
def results(pool: Pool, request: pytest.FixtureRequest) -> dict[tuple[str, str, bool], Result]:
    """Runs all cases that the session asks for, each layout in one go; returns their results."""

    wanted: dict[str, list[tuple[str, bool]]] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and "row" in (
            item.callspec.params if hasattr(item, "callspec") else ()
        ):
            wanted.setdefault(item.callspec.params["layout"], []).append(
                item.callspec.params["row"]
            )
    return {
        (result.name, layout, result.has_weight): result
        for layout, rows in wanted.items()
        for result in run(pool, layout, rows)
    }


@pytest.mark.sample(keep=32)
@pytest.mark.parametrize("row", ROWS, ids=NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_is_that_of_the_plain_script_or_it_warns(
    results: dict[tuple[str, str, bool], Result], layout: str, row: tuple[str, bool]
) -> None:
    result = results[row[0], layout, row[1]]
    assert result.outcome == expected(result), line(result)


def test_the_table_has_losses_of_both_outcomes_and_no_defect() -> None:
    assert len(CASES) >= 60
    found = {CASES[name].expected(layout, weight) for name, weight in ROWS for layout in LAYOUTS}
    assert {EQUAL, WARNED} <= found <= {EQUAL, WARNED, EQUAL_WARNED, REFUSED}, (
        "a defect is expected"
    )
