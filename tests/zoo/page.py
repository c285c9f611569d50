"""Reads the page that `table` writes: results of runs whose files are gone."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.zoo.judging import SKIPPED, Result

_SECONDS = re.compile(r"([\d.]+) s")
_TIMES = re.compile(r"a later step ([\d.]+) times \(median\)")


def results_of(text: str) -> list[Result]:
    """Reads the results that a page holds.

    Reasons are as short as they are there, and each is given to the first of the modes that was not
    equal. A page names what was skipped in its first mode only: in others it is counted, so that
    many models without a name come out.

    Args:
        text: text of the page.

    Raises:
        ValueError: a row is not as `table` writes it.
    """
    head, _, rest = text.partition("\n## By model\n")
    rows, _, skipped = rest.partition("\n## Not tried\n")
    _, *models = _table(rows)
    modes = _table(rows)[0][1:-2]
    found = _TIMES.search(rows)
    ratio = float(found[1]) if found else 0.0
    results = [result for row in models for result in _of_model(row, modes, ratio)]
    for name, reason in _table(skipped)[1:]:
        results.append(_result(name, modes[0], SKIPPED, reason))
    for row in _table(head):
        if row[0] in modes[1:]:
            results += [
                Result(f"transformers/unnamed/{number}", "unnamed", row[0], SKIPPED)
                for number in range(int(row[-1]))
            ]
    return sorted(results, key=lambda result: modes.index(result.mode))


def _table(text: str) -> list[list[str]]:
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def _of_model(row: list[str], modes: list[str], ratio: float) -> Iterator[Result]:
    name, *cells, seconds, reason = row
    found = _SECONDS.fullmatch(seconds)
    if len(cells) != len(modes) or found is None:
        raise ValueError(
            f"expected a model, {len(modes)} outcomes, seconds and a reason; got {row}"
        )
    given = [(mode, cell) for mode, cell in zip(modes, cells, strict=True) if cell]
    other = next((mode for mode, cell in given if not cell.startswith("equal")), given[0][0])
    for mode, cell in given:
        result = _result(name, mode, cell.removesuffix(" ="), reason if mode == other else "")
        result.bitwise = cell.endswith(" =")
        result.first_step_s = float(found[1])
        if ratio:
            result.step_s, result.alone_s = ratio, 1.0
        yield result


def _result(name: str, mode: str, outcome: str, reason: str) -> Result:
    source, _, rest = name.rpartition(": ")[0].rpartition(" ")
    family = rest
    if not source:
        source = "patterns" if family == "patterns" else "transformers"
    return Result(f"{source}/{family}/{name.rpartition(': ')[2]}", family, mode, outcome, reason)
