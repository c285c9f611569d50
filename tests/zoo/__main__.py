"""``python -m tests.zoo``: runs the models of the zoo and writes what came out."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

from tests.dist.pool import Pool
from tests.zoo.building import make_plan
from tests.zoo.catalogue import OPTIONAL, Entry, entries, missing_sources
from tests.zoo.judging import CRASH, SKIPPED, Result, first_line, is_bad, run
from tests.zoo.known import reason_for
from tests.zoo.modes import MODES, Mode
from tests.zoo.running import Job, make_batches, train_alone
from tests.zoo.table import read, write

_ALL = "0/1"  # the only part of one


def run_entry(pool: Pool, entry: Entry, modes: list[Mode]) -> list[Result]:
    """Runs one model in some modes; a model that fails in one process is skipped."""
    results = []
    try:
        plan = make_plan(entry)
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(str(error))[:600]}"
        return [Result(str(entry), entry.family, mode.name, SKIPPED, reason) for mode in modes]
    for mode in modes:
        if mode.outputs and entry.source != "transformers":
            continue  # have no optional outputs
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


def choose(only: str | None, all_classes: bool) -> list[Entry]:
    """Entries that a pattern names; the first of each family, unless it names others only."""
    for every in (all_classes, True):
        found = [e for e in entries(every) if only is None or _is_named(e, only)]
        if found:
            return found
    raise SystemExit(f"no model is called *{only}*")


def _is_named(entry: Entry, only: str) -> bool:
    return any(fnmatch.fnmatch(str(entry), f"*{pattern}*") for pattern in only.split(","))


def main() -> int:
    options = _parser().parse_args()
    if options.read:
        write(options.table, read(options.read), options.note)
        return 0
    warnings.filterwarnings("ignore")
    start = time.monotonic()
    results = run_chosen(options) if options.jobs == 1 else run_side_by_side(options.jobs)
    if options.part != _ALL:
        return 0  # the process that started this part says the rest
    if options.json and options.jobs > 1:
        options.json.write_text("".join(map(_as_json, results)))
    for name in options.mode or ["pp2"]:
        counts = Counter(r.outcome for r in results if r.mode == name)
        bitwise = sum(r.bitwise for r in results if r.mode == name)
        print(f"{name}: {dict(counts)}, {bitwise} bitwise; {time.monotonic() - start:.0f} s")
    if missing_sources():
        print(f"not installed, and left out: {', '.join(missing_sources())}")
    if options.table:
        write(options.table, results, options.note)
    defects = [r for r in results if is_bad(r) and reason_for(r) is None]
    for result in defects if options.check else []:
        print(f"defect: {_line(result)}")
    return 1 if options.check and defects else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo")
    parser.add_argument("--mode", action="append", choices=sorted(MODES), help="default: pp2")
    parser.add_argument("--only", help="patterns of source/family/class, with commas between")
    parser.add_argument("--all-classes", action="store_true", help="not one of each family only")
    parser.add_argument("--json", type=Path, help="results, a line each; kept up to date")
    parser.add_argument("--table", type=Path, help="page to write")
    parser.add_argument(
        "--read",
        type=Path,
        nargs="+",
        help="results of earlier runs, or a page (.md); nothing is run, for --table",
    )
    parser.add_argument("--note", default="", help="a sentence for the page: what was run how")
    parser.add_argument("--sample", type=int, default=1, metavar="N", help="every Nth model only")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="models side by side")
    parser.add_argument("--part", default=_ALL, help="I/N: part I of N of the models")
    parser.add_argument("--check", action="store_true", help="fail on defects that are not known")
    parser.add_argument("--details", action="store_true", help="whole errors")
    return parser


def run_chosen(options: argparse.Namespace) -> list[Result]:
    """Runs all models that the options name, one after the other."""
    modes = [MODES[name] for name in options.mode or ["pp2"]]
    part, num_parts = map(int, options.part.split("/"))
    chosen = choose(options.only, options.all_classes)[:: options.sample][part::num_parts]
    # Else each rank of each model imports its package: seconds for diffusers.
    modules = sorted({entry.module for entry in chosen if entry.source in OPTIONAL})
    os.environ["SMP_TEST_PRELOAD"] = ",".join(modules)
    results: list[Result] = []
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
                    out.write(_as_json(result))
                    out.flush()
    finally:
        pool.close()
    return results


def run_side_by_side(num_jobs: int) -> list[Result]:
    """The same by several processes: while one makes a plan, ranks of another one train."""
    own = [sys.executable, "-m", "tests.zoo", *sys.argv[1:], "--jobs=1"]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{part}.json" for part in range(num_jobs)]
        jobs = [
            subprocess.Popen([*own, f"--part={part}/{num_jobs}", f"--json={file}"])
            for part, file in enumerate(files)
        ]
        codes = [job.wait() for job in jobs]
        missing = [file for file in files if not file.exists()]
        if missing:
            raise SystemExit(f"a part of the zoo did not run; the parts ended with {codes}")
        return read(files)


def _as_json(result: Result) -> str:
    return json.dumps(dataclasses.asdict(result)) + "\n"


def _line(result: Result) -> str:
    exact = " bitwise" if result.bitwise else ""
    times = f"{result.first_step_s:.2f} s" if result.first_step_s else ""
    return (
        f"{result.outcome:9}{exact:8} {result.mode:6} {result.model} {times} {result.reason[:300]}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
