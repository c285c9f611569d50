"""Stall until a process that waits has the place of a dead rank, and the price before it dies.

    python benchmarks/spares.py                 # JSON lines on the standard output
    python benchmarks/spares.py --repeats 20

`stall` is the time from the death of a rank to the end of the step that is run again, by part: the
process that waits builds its model in "agree", and gets its state in "models". `growing` is the
time for which ranks stop until a replica more takes part. `waiting` is the CPU time of a process
that waits, per second. `overhead` is the ratio of steps with `redundancy=1` to steps of a job that
ends with any of its ranks, which take turns in one job of pp 2; the copies have `copy_bytes`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("SMP_DEVICE", "cpu")
REPO = Path(__file__).resolve().parents[1]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from benchmarks import going_on  # noqa: E402
from benchmarks.environment import describe  # noqa: E402
from smp.world import runtime  # noqa: E402
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


def growing(pool: Pool) -> dict[str, float]:
    """Returns the seconds of each part while a replica of pp 2 joins another one.

    The two processes start when a rank has died. The time begins when the other ranks stop at the
    beginning of a step, and ends with this step; the slowest one counts.
    """
    argv = [f"--config={json.dumps(CONFIG)}", "--die=3:backward:2", f"--until={NUM_RANKS}"]
    argv += ["--steps=6", "--step-s=0.03"]
    env = {"SMP_SPARES": "0"}
    job = start_ranks(pool, going_on.SCRIPT, NUM_RANKS, argv, env=env, launcher="smp run")
    while pool.zygote().ended(job.pids[3]) is None:
        time.sleep(0.02)
    for number in (NUM_RANKS, NUM_RANKS + 1):
        own = {"SMP_RANK": str(number), "SMP_WORLD_SIZE": str(NUM_RANKS), **env}
        own["SMP_RENDEZVOUS"] = f"file://{job.folder}/rendezvous"
        log = str(job.folder / f"rank{number}.log")
        job.pids.extend(pool.zygote().start("script", str(going_on.SCRIPT), argv, own, log))
    texts = [rank.output for rank in wait_for_ranks(pool, job)]
    parts = []
    for text in texts:
        changes = re.findall(r"^RESIZED (\S+) (\{.*\})\n(?:.*\n)*?DONE \d+ (\S+)", text, re.M)
        if len(changes) == 2:  # first the ranks are lost
            end_s, seconds, done_s = changes[1]
            first_step = float(done_s) - float(end_s)
            parts.append({"notice": 0.0, **json.loads(seconds), "first_step": first_step})
    if len(parts) != 2:
        raise RuntimeError("\n".join(texts))
    return max(parts, key=lambda own: sum(own.values()))


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


def copying(rank: int, width: int, num_turns: int) -> tuple[list[tuple[float, float]], int]:
    """Returns the turns of `going_on.overhead` with copies, and the bytes that a rank keeps."""
    own = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE")}
    os.environ.update({f"SMP_{name}": value for name, value in own.items()}, SMP_SPARES="1")
    turns = going_on.overhead(rank, 2, width, num_turns, redundancy=1)
    copies = runtime.current().copies
    assert copies is not None and copies.kept is not None, "no copy was kept"
    return turns, copies.kept.num_bytes


def overhead(pool: Pool, width: int, num_turns: int) -> dict[str, Any]:
    """Returns the price of copies of a model of two layers."""
    from benchmarks import spares  # workers find the function by the name of its module

    found = pool.run(2, spares.copying, width, num_turns)
    result = going_on.summarise_overhead(2, width, [turns for turns, _ in found], "spares")
    return result | {"copy_bytes": found[0][1]}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="of each place of death")
    parser.add_argument("--seconds", type=float, default=20.0, help="of waiting")
    parser.add_argument("--turns", type=int, default=40, help="turns of ten steps")
    args = parser.parse_args()
    pool, where = Pool(), describe()
    for width in (64, 1024):
        print(json.dumps(overhead(pool, width, args.turns) | {"environment": where}), flush=True)
    found = [stall(pool, p, n % NUM_RANKS) for n in range(args.repeats) for p in PLACES]
    print(
        json.dumps(going_on.summarise_stall(found, "spares") | {"environment": where}), flush=True
    )
    grown = going_on.summarise_stall([growing(pool) for _ in range(2 * args.repeats)], "spares")
    print(json.dumps(grown | {"case": "growing", "environment": where}), flush=True)
    share = waiting(pool, args.seconds)
    print(json.dumps({"benchmark": "spares", "case": "waiting", "cpu_share": share}), flush=True)
    pool.close()


if __name__ == "__main__":
    main()
