"""Losses are those of the plain script on the whole batch, or smp warns that they are not."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.dist.pool import Pool
from tests.losses.__main__ import chosen, expected, line
from tests.losses.case import EQUAL, EQUAL_WARNED, REFUSED, WARNED
from tests.losses.catalogue import CASES
from tests.losses.running import LAYOUTS, Result, run

ROWS = chosen(list(CASES))
Results = Callable[[str], dict[tuple[str, bool], Result]]
NAMES = [f"{name} (weight)" if has_weight else name for name, has_weight in ROWS]


@pytest.fixture(scope="session")
def results_of(pool: Pool, request: pytest.FixtureRequest) -> Results:
    """Returns the results of a layout, of which all cases of the session run in one go."""
    wanted: dict[str, list[tuple[str, bool]]] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            params = item.callspec.params
            if "row" in params:
                wanted.setdefault(params["layout"], []).append(params["row"])

    @functools.cache
    def results(layout: str) -> dict[tuple[str, bool], Result]:
        return {(r.name, r.has_weight): r for r in run(pool, layout, wanted[layout])}

    return results


@pytest.mark.sample(keep=20)
@pytest.mark.parametrize("row", ROWS, ids=NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_is_that_of_the_plain_script_or_it_warns(
    results_of: Results, layout: str, row: tuple[str, bool]
) -> None:
    result = results_of(layout)[row]
    assert result.outcome == expected(result), line(result)


def test_the_table_has_losses_of_both_outcomes_and_no_defect() -> None:
    assert len(CASES) >= 60
    found = {CASES[name].expected(layout, weight) for name, weight in ROWS for layout in LAYOUTS}
    assert {EQUAL, WARNED} <= found <= {EQUAL, WARNED, EQUAL_WARNED, REFUSED}, (
        "a defect is expected"
    )
