"""``python -m tests.zoo``: runs the models of the zoo and writes what came out."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import time
import warnings
from collections import Counter
from pathlib import Path

from tests.dist.pool import Pool
from tests.zoo.building import make_plan
from tests.zoo.catalogue import Entry, entries
from tests.zoo.judging import CRASH, SKIPPED, Result, first_line, run
from tests.zoo.modes import MODES, Mode
from tests.zoo.running import Job, make_batches, train_alone


def run_entry(pool: Pool, entry: Entry, modes: list[Mode]) -> list[Result]:
    """One model in some modes; what fails in one process is skipped."""
    results = []
    try:
        plan = make_plan(entry)
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(str(error))[:600]}"
        return [Result(str(entry), entry.family, mode.name, SKIPPED, reason) for mode in modes]
    for mode in modes:
        try:
            batches = make_batches(plan, mode.replicas)
            job = Job(plan, mode, batches)
            alone = train_alone(job)
        except Exception as error:
            reason = f"in one process: {type(error).__name__}: {first_line(str(error))[:600]}"
            results.append(Result(str(entry), entry.family, mode.name, SKIPPED, reason))
            continue
        try:
            results.append(run(pool, job, alone))
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(str(error))}"
            results.append(Result(str(entry), entry.family, mode.name, CRASH, reason))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo")
    parser.add_argument("--mode", action="append", choices=sorted(MODES), help="default: pp2")
    parser.add_argument("--only", help="pattern of source/family/class")
    parser.add_argument("--all-classes", action="store_true", help="not one of each family only")
    parser.add_argument("--json", type=Path, help="results, a line each; kept up to date")
    parser.add_argument("--table", type=Path, help="page to write")
    parser.add_argument("--details", action="store_true", help="whole errors")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    modes = [MODES[name] for name in options.mode or ["pp2"]]
    chosen = [
        entry
        for entry in entries(options.all_classes or bool(options.only))
        if options.only is None or fnmatch.fnmatch(str(entry), f"*{options.only}*")
    ]
    results: list[Result] = []
    start = time.monotonic()
    pool = Pool()
    out = open(options.json, "w") if options.json else None  # noqa: SIM115
    try:
        for entry in chosen:
            for result in run_entry(pool, entry, modes):
                results.append(result)
                print(_line(result), flush=True)
                if options.details and result.details:
                    print(result.details)
                if out is not None:
                    out.write(json.dumps(dataclasses.asdict(result)) + "\n")
                    out.flush()
    finally:
        pool.close()
    for mode in modes:
        counts = Counter(r.outcome for r in results if r.mode == mode.name)
        bitwise = sum(r.bitwise for r in results if r.mode == mode.name)
        print(f"{mode.name}: {dict(counts)}, {bitwise} bitwise; {time.monotonic() - start:.0f} s")
    if options.table:
        from tests.zoo.table import write

        write(options.table, results)
    return 0


def _line(result: Result) -> str:
    exact = " bitwise" if result.bitwise else ""
    times = f"{result.first_step_s:.2f} s" if result.first_step_s else ""
    return f"{result.outcome:9}{exact:8} {result.mode:6} {result.model} {times} {result.reason[:300]}"


if __name__ == "__main__":
    raise SystemExit(main())
