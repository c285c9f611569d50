"""Stall until a process that waits has the place of a dead rank, and the price of its waiting.

    python benchmarks/spares.py                 # JSON lines on the standard output
    python benchmarks/spares.py --repeats 20

`stall` is the time from the death of a rank to the end of the step that is run again, by part: the
process that waits builds its model in "agree", and gets its state in "models". `waiting` is the CPU
time of a process that waits, per second.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("SMP_DEVICE", "cpu")
REPO = Path(__file__).resolve().parents[1]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from benchmarks import going_on  # noqa: E402
from benchmarks.environment import describe  # noqa: E402
from tests.dist.pool import Pool  # noqa: E402
from tests.dist.processes import run_ranks, start_ranks, wait_for_ranks  # noqa: E402

CONFIG = {"pipeline_parallel_degree": 2, "on_failure": "spare"}
PLACES = ("forward", "backward", "sum", "optimizer")
NUM_RANKS = 4


def stall(pool: Pool, place: str, victim: int) -> dict[str, float]:
    """Returns the seconds of each part after the death of a rank of pp 2 x dp 2."""
    argv = [f"--config={json.dumps(CONFIG)}", f"--die={victim}:{place}:3"]
    ended = run_ranks(pool, going_on.SCRIPT, NUM_RANKS, argv, launcher="smp run", spares=1)
    texts = [rank.output for rank in ended]
    if "TAKEN " not in texts[NUM_RANKS]:
        raise RuntimeError("\n".join(texts))
    return going_on.longest_stall(texts, victim, NUM_RANKS - 1)


def waiting(pool: Pool, seconds: float) -> float:
    """Returns the CPU time per second of a process that waits while four ranks train."""
    argv = [f"--config={json.dumps(CONFIG)}", "--steps=100000", "--step-s=0.05"]
    job = start_ranks(pool, going_on.SCRIPT, NUM_RANKS, argv, launcher="smp run", spares=1)
    log = job.folder / "rank0.log"
    while not (log.exists() and "DONE 5 " in log.read_text()):
        time.sleep(0.1)
    before_s, began_s = _cpu_s(job.pids[-1]), time.monotonic()
    time.sleep(seconds)
    used_s, passed_s = _cpu_s(job.pids[-1]) - before_s, time.monotonic() - began_s
    for pid in job.pids:
        pool.zygote().kill(pid)
    wait_for_ranks(pool, job)
    return used_s / passed_s


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="of each place of death")
    parser.add_argument("--seconds", type=float, default=20.0, help="of waiting")
    args = parser.parse_args()
    pool, where = Pool(), describe()
    found = [stall(pool, p, n % NUM_RANKS) for n in range(args.repeats) for p in PLACES]
    print(
        json.dumps(going_on.summarise_stall(found, "spares") | {"environment": where}), flush=True
    )
    share = waiting(pool, args.seconds)
    print(json.dumps({"benchmark": "spares", "case": "waiting", "cpu_share": share}), flush=True)
    pool.close()


if __name__ == "__main__":
    main()
