"""Chooses cases of tests: `make test` takes one of each claim, `make test-all` the others.

``SMP_SAMPLES`` is `some` (the default), `others` or `all`. Of a test with parameters, `some` runs
one case, or n with the marker ``sample(keep=n)``, which show as many values of each parameter as n
can. `others` runs so many that both together show every value; what a product has beyond that runs
with ``SMP_GRID=all`` only. With ``covering(times=t)`` both together show each value t times. A test
with ``sample`` alone divides its work by itself and runs in both. A test without parameters runs in
`some`, or in `others` with ``sample(keep=0)``: it takes long, and quicker tests show its claim.

``SMP_SHARE=k/n`` keeps the k-th of n shares of the `others`, and n runs with all k keep everything.
CI takes another eighth with each commit.

A file in tests/dist is about one claim, which its first test shows, and its tests start processes:
`some` runs the first NUM_OF_A_FILE of those that are left, and those with ``sample(keep=n)``.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import pytest

from tests.dist.grid.covering import Row, covering_sample

T = TypeVar("T", bound=Hashable)

GRID_SEED = int(os.environ.get("SMP_GRID_SEED", "1"))
NUM_OF_A_FILE = 1
RUNS_GRID = os.environ.get("SMP_GRID") == "all"
SAMPLES = "all" if RUNS_GRID else os.environ.get("SMP_SAMPLES", "some")
if SAMPLES not in ("some", "others", "all"):
    raise ValueError(f"SMP_SAMPLES is '{SAMPLES}'; expected some, others or all")


def _share(text: str) -> tuple[int, int]:
    """Returns k and n of ``k/n``."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"SMP_SHARE is '{text}'; expected k/n with 1 <= k <= n, such as 1/3")
    return int(found[1]), int(found[2])


SHARE = _share(os.environ.get("SMP_SHARE", "1/1"))


def part_of(items: Sequence[T], num_some: int) -> list[T]:
    """Returns the first items or the others, for a test that divides its work itself."""
    return {
        "some": list(items[:num_some]),
        "others": list(items[num_some:]),
        "all": list(items),
    }[SAMPLES]


def spread(rows: Sequence[Row], num_rows: int) -> list[Row]:
    """A few rows that show as many values of each column as they can; the same ones each time."""
    best = covering_sample(rows, 1, 0)
    return [*best, *(row for row in rows if row not in best)][:num_rows]


def completing(rows: Sequence[Row], shown: Sequence[Row]) -> list[Row]:
    """Returns rows that show the values of columns which the shown ones do not."""
    missing = _values(rows) - _values(shown)
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(_values([row]) & missing))
        chosen.append(best)
        missing -= _values([best])
    return chosen


def _values(rows: Iterable[Row]) -> set[tuple[int, Hashable]]:
    return {value for row in rows for value in enumerate(row)}


def to_run(items: list[pytest.Item]) -> set[pytest.Item]:
    """Returns those of a session's tests that the environment asks for."""
    chosen = set(items) - _beyond_covering(items)
    some = chosen - _beyond_samples(item for item in items if item in chosen)
    some -= _beyond_files(item for item in items if item in some)
    if SAMPLES == "some":
        return some
    chosen -= _beyond_values([item for item in items if item in chosen])
    if SAMPLES == "all":
        return chosen
    itself = {i for i in some if (m := i.get_closest_marker("sample")) and "keep" not in m.kwargs}
    return {item for item in chosen - some | itself if is_in(SHARE, item.nodeid)}


def is_in(share: tuple[int, int], name: str) -> bool:
    """Returns whether a test is in share k of n, by its name."""
    return zlib.crc32(name.encode()) % share[1] == share[0] - 1


def _by_row(
    items: Iterable[pytest.Item], name: str, default: int | None = None
) -> dict[str, tuple[int, dict[Row, pytest.Item]]]:
    """Returns tests by function: the number of a marker, and cases by their row.

    Args:
        items: tests of the session.
        name: name of the marker, whose keyword argument is the number.
        default: number for tests with parameters and without the marker; None leaves them out.
    """
    products: dict[str, tuple[int, dict[Row, pytest.Item]]] = {}
    rows: dict[str, dict[Row, pytest.Item]] = defaultdict(dict)
    for item in items:
        marker = item.get_closest_marker(name)
        parameters = getattr(item, "callspec", None)
        number = default if parameters else None
        if marker is not None:
            number = next(iter(marker.kwargs.values()), None)
        if number is None or not isinstance(item, pytest.Function):
            continue
        function = item.nodeid.split("[")[0]
        # One per decorator. `indices`, which is public, numbers whole tests since pytest 9.
        rows[function][tuple(parameters._idlist) if parameters else ()] = item
        products[function] = (number, rows[function])
    return products


def _beyond_covering(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    left_out: set[pytest.Item] = set()
    if RUNS_GRID:
        return left_out
    for times, by_row in _by_row(items, "covering").values():
        rows = list(by_row)
        for repetition in range(times):
            chosen = set(covering_sample(rows, 1, 1000 * repetition + GRID_SEED))
            rows = [row for row in rows if row not in chosen]
        left_out |= {by_row[row] for row in rows}
    return left_out


def _beyond_samples(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    left_out: set[pytest.Item] = set()
    for keep, by_row in _by_row(items, "sample", default=1).values():
        kept = set(spread(list(by_row), keep))
        left_out |= {item for row, item in by_row.items() if row not in kept}
    return left_out


def _beyond_files(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Returns what follows the first tests of each file in tests/dist."""
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        file = item.nodeid.split("::")[0]
        if file.startswith("tests/dist/") and not item.get_closest_marker("sample"):
            files[file].append(item)
    return {item for tests in files.values() for item in tests[NUM_OF_A_FILE:]}


def _beyond_values(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Cases of samples whose values other cases show, where no ``covering`` says how often."""
    left_out: set[pytest.Item] = set()
    if RUNS_GRID:
        return left_out
    for keep, by_row in _by_row(items, "sample", default=1).values():
        without_parameters = list(by_row) == [()]
        if without_parameters or any(i.get_closest_marker("covering") for i in by_row.values()):
            continue
        some = spread(list(by_row), keep)
        rest = [row for row in by_row if row not in some]
        needed = set(completing(rest, some))
        left_out |= {by_row[row] for row in rest if row not in needed}
    return left_out
