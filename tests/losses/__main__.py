"""``python -m tests.losses``: runs losses, and writes the page of what came out."""

from __future__ import annotations

import argparse
import fnmatch
from collections import Counter
from pathlib import Path

from tests.dist.pool import Pool
from tests.losses.catalogue import CASES
from tests.losses.running import LAYOUTS, Result, run
from tests.losses.table import write


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.losses")
    parser.add_argument("--layout", action="append", choices=list(LAYOUTS), help="default: all")
    parser.add_argument("--only", default="*", help="pattern of names")
    parser.add_argument("--table", type=Path, help="page to write")
    parser.add_argument("--check", action="store_true", help="fail on what is not as expected")
    options = parser.parse_args()
    names = [name for name in CASES if fnmatch.fnmatch(name, options.only)]
    pool = Pool()
    try:
        results = [
            result
            for layout in options.layout or LAYOUTS
            for result in run(pool, layout, chosen(names))
        ]
    finally:
        pool.close()
    for result in results:
        print(line(result))
    print(Counter((result.layout, result.outcome) for result in results))
    if options.table:
        write(options.table, results)
    wrong = [result for result in results if result.outcome != expected(result)]
    return 1 if options.check and wrong else 0


def chosen(names: list[str]) -> list[tuple[str, bool]]:
    """Returns each case without a weight, and with the weight that it needs."""
    return [
        (name, has_weight)
        for name in names
        for has_weight in ([False] if CASES[name].weight is None else [False, True])
    ]


def expected(result: Result) -> str:
    return CASES[result.name].expected(result.layout, result.has_weight)


def line(result: Result) -> str:
    mark = "" if result.outcome == expected(result) else f" (expected {expected(result)})"
    weight = " with its weight" if result.has_weight else ""
    return (
        f"{result.outcome:9} {result.error:.1e} {result.layout:11} "
        f"{result.name}{weight}{mark} {result.words[:160]}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
