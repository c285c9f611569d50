"""Seconds from a fault of one rank until another names it, and until all others have ended.

    python benchmarks/faults.py                   # JSON lines on the standard output
    python benchmarks/faults.py --only kill --repeats 20

Two ranks train a small chain; each of them is the victim in turn. `ratio_to_limit` is the median of
`named_s` over the limit of the watch behind it: the 5 s of the search for deadlocks, or
`SMP_HANG_S`. Tests say which watch ends a wait, and read no clock
(`tests/dist/test_fault_exit.py`, `test_alarms.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("SMP_DEVICE", "cpu")
REPO = Path(__file__).resolve().parents[1]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from benchmarks.environment import describe  # noqa: E402
from tests.dist.pool import Pool  # noqa: E402
from tests.dist.processes import start_ranks, wait_for_ranks  # noqa: E402

SCRIPTS = REPO / "tests" / "dist" / "scripts"
DEADLOCK_S, HANG_S = 5.0, 3.0


@dataclass(frozen=True)
class Case:
    """A fault, and how the other rank names it."""

    script: str
    action: str
    place: str = ""
    """Place of the fault in ``fault.py``."""
    words: str = r"(?<!\[)global_rank {victim}\b"
    limit_s: float | None = None

    def argv(self, victim: int) -> list[str]:
        return [self.action, *([self.place] if self.place else []), str(victim), "--pp=2"]


CASES = {
    "kill": Case("fault.py", "kill", "forward"),
    "raise": Case("fault.py", "raise", "forward"),
    "exit": Case("fault.py", "exit", "between"),
    "leave": Case("fault.py", "none", "fewer"),
    "deadlock": Case("fault.py", "barrier", "between", "deadlock", DEADLOCK_S),
    "stop": Case("alarm.py", "stop", "", "global_rank {victim} .*HAS SAID NOTHING", HANG_S),
    "loop": Case("alarm.py", "loop", "", "global_rank {victim} .*DOES NOT WAIT", HANG_S),
}


def measure(pool: Pool, case: Case, victim: int) -> tuple[float, float]:
    """Returns the seconds until the victim is named, and until the other rank has ended.

    Reports of a watch come from rank 0, which may be the victim.
    """
    other = 1 - victim
    started = start_ranks(
        pool, SCRIPTS / case.script, 2, case.argv(victim), env={"SMP_HANG_S": str(HANG_S)}
    )
    logs = [started.folder / f"rank{rank}.log" for rank in (0, 1)]
    looked_at = logs if case.limit_s else [logs[other]]
    words = case.words.format(victim=victim)
    named_at = float("inf")
    while pool.zygote().ended(started.pids[other]) is None:
        texts = [log.read_text() for log in looked_at if log.exists()]
        if named_at == float("inf") and any(re.search(words, text) for text in texts):
            named_at = time.monotonic()
        time.sleep(0.005)
    pool.zygote().kill(started.pids[victim])
    results = wait_for_ranks(pool, started)
    began = re.search(r"^(?:FAULT|AT) ([\d.]+)", results[victim].output, re.MULTILINE)
    text = "\n".join(result.output for result in results)
    if began is None or results[other].hung or not re.search(words, text):
        raise RuntimeError(f"{case}, victim {victim}:\n{text}")
    gone_at = results[other].time
    return min(named_at, gone_at) - float(began[1]), gone_at - float(began[1])


def summarise(name: str, seconds: list[tuple[float, float]]) -> dict[str, object]:
    """Returns one result."""
    named, gone = zip(*seconds, strict=True)
    result: dict[str, object] = {
        "benchmark": "faults",
        "case": name,
        "num_processes": 2,
        "repeats": len(seconds),
        "named_s": statistics.median(named),
        "named_worst_s": max(named),
        "gone_s": statistics.median(gone),
        "gone_worst_s": max(gone),
    }
    if limit_s := CASES[name].limit_s:
        result |= {"limit_s": limit_s, "ratio_to_limit": statistics.median(named) / limit_s}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=CASES, help="this case alone")
    parser.add_argument("--repeats", type=int, default=5, help="of each victim")
    args = parser.parse_args()
    pool, where = Pool(), describe()
    for name, case in CASES.items():
        if args.only in (None, name):
            victims = [0, 1] * args.repeats
            result = summarise(name, [measure(pool, case, victim) for victim in victims])
            print(json.dumps(result | {"environment": where}), flush=True)
    pool.close()


if __name__ == "__main__":
    main()
