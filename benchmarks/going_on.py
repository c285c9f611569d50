"""Stall after the loss of a rank, by part, and the price of being able to go on.

    python benchmarks/going_on.py                 # JSON lines on the standard output
    python benchmarks/going_on.py --only stall --repeats 20
    python benchmarks/going_on.py --only torchft  # needs torchft-nightly beside the package

`stall` is the time from the death of a rank to the end of the first step without it, over places of
death in a step. `overhead` is the ratio of steps with `on_failure="shrink"` to steps without, which
take turns in one job; wall time, and CPU time of all ranks. `torchft` has the same deaths of one of
three replicas without a pipeline, one after the other with this library and with torchft over Gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("SMP_DEVICE", "cpu")
REPO = Path(__file__).resolve().parents[1]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

import torch  # noqa: E402
from torch import nn  # noqa: E402

import smp  # noqa: E402
from benchmarks.environment import describe  # noqa: E402
from smp.world import runtime  # noqa: E402
from tests.dist.pool import Pool  # noqa: E402
from tests.dist.processes import run_ranks  # noqa: E402

SCRIPT = REPO / "tests" / "dist" / "scripts" / "going_on.py"
TORCHFT_SCRIPT = REPO / "benchmarks" / "torchft_loop.py"
# Milliseconds after which torchft's lighthouse gives up ranks that do not join or say nothing: its
# own defaults, and short ones.
TORCHFT_TIMES = {"default": (60_000, 5_000), "short": (1_000, 1_000)}
PLACES = ("forward", "backward", "sum", "confirm", "optimizer")
PARTS = ("notice", "agree", "groups", "models", "first_step")
TURN = 10  # steps of one kind, one after the other


def stall(pool: Pool, place: str, victim: int, pp: int = 2, dp: int = 2) -> dict[str, float]:
    """Returns the seconds of each part after the death of a rank."""
    config = {"pipeline_parallel_degree": pp, "on_failure": "shrink"}
    argv = [f"--config={json.dumps(config)}", f"--die={victim}:{place}:3"]
    ended = run_ranks(pool, SCRIPT, pp * dp, argv)
    return longest_stall([rank.output for rank in ended], victim, pp * (dp - 1))


def longest_stall(texts: list[str], victim: int, num_others: int) -> dict[str, float]:
    """Returns the seconds of each part on the rank that has lost most time.

    Args:
        texts: outputs of the ranks.
        victim: the rank that died.
        num_others: number of ranks that have noticed its death and gone on.
    """
    died = re.search(r"^AT (\S+)", texts[victim], re.MULTILINE)
    parts: list[dict[str, float]] = []
    for text in texts:
        found = re.search(r"^RESIZED (\S+) (\{.*\})\n(?:.*\n)*?DONE \d+ (\S+)", text, re.MULTILINE)
        if found and died:
            seconds: dict[str, float] = json.loads(found[2])
            notice = float(found[1]) - sum(seconds.values()) - float(died[1])
            parts.append(
                {"notice": notice, **seconds, "first_step": float(found[3]) - float(found[1])}
            )
    if len(parts) != num_others:
        raise RuntimeError("\n".join(texts))
    return max(parts, key=lambda own: sum(own.values()))


def torchft_stall(pool: Pool, place: str, victim: int, times_ms: tuple[int, int]) -> float:
    """Returns the seconds from the death of one of three replicas to the next update of all others.

    Args:
        times_ms: limits for ranks that do not join and that say nothing.
    """
    from torchft.coordination import LighthouseServer

    join_ms, heartbeat_ms = times_ms
    house = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=2,
        join_timeout_ms=join_ms,
        quorum_tick_ms=100,
        heartbeat_timeout_ms=heartbeat_ms,
    )
    try:
        argv = [f"--lighthouse={house.address()}", f"--die={victim}:{place}:3", "--steps=8"]
        with tempfile.TemporaryDirectory() as folder:
            argv.append(f"--meet={folder}")
            texts = [rank.output for rank in run_ranks(pool, TORCHFT_SCRIPT, 3, argv)]
    finally:
        house.shutdown()
    died = re.search(r"^AT (\S+)", texts[victim], re.MULTILINE)
    seconds = []
    for text in texts[:victim] + texts[victim + 1 :]:
        updates = re.findall(r"^DONE \d+ (\S+) 2$", text, re.MULTILINE)
        if died and updates:
            seconds.append(float(updates[0]) - float(died[1]))
    if len(seconds) != 2:
        raise RuntimeError("\n".join(texts))
    return max(seconds)


def beside_torchft(pool: Pool, repeats: int) -> dict[str, Any]:
    """Returns median and longest stalls of both libraries, which take turns."""
    found: dict[str, list[float]] = {"smp": [], **{name: [] for name in TORCHFT_TIMES}}
    for number in range(repeats):
        for place in ("forward", "backward", "optimizer"):
            victim = number % 3
            parts = stall(pool, place, victim, pp=1, dp=3)
            found["smp"].append(sum(parts.values()))
            for name, times_ms in TORCHFT_TIMES.items():
                found[name].append(torchft_stall(pool, place, victim, times_ms))
    return {
        "benchmark": "going_on",
        "case": "torchft",
        "repeats": len(found["smp"]),
        **{f"{name}_median_s": statistics.median(seconds) for name, seconds in found.items()},
        **{f"{name}_worst_s": max(seconds) for name, seconds in found.items()},
    }


def overhead(
    rank: int, pp: int, width: int, num_turns: int, redundancy: int = 0
) -> list[tuple[float, float]]:
    """Returns seconds of wall and CPU time of each turn, with and without in turn."""
    smp.init(
        {
            "pipeline_parallel_degree": pp,
            "microbatches": 2,
            "ddp": True,
            "auto_partition": False,
            "on_failure": "spare" if redundancy else "shrink",
            "redundancy": redundancy,
        }
    )
    layers: list[nn.Module] = []
    for index in range(2):
        with smp.partition(index * pp // 2):
            layers.append(nn.Sequential(nn.Linear(width, width), nn.Tanh()))
    model = smp.DistributedModel(nn.Sequential(*layers))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @smp.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        model.backward(loss)
        return loss

    if redundancy:
        smp.take_over(lambda: runtime.current().steps.num_begun)
    current, turns = runtime.current(), []
    survivors = current.survivors
    x = torch.randn(64, width)
    for turn in range(-2, num_turns):
        current.survivors = survivors if turn % 2 == 0 else None
        smp.barrier()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(TURN):
            train_step(x)
            optimizer.step()
            optimizer.zero_grad()
        if turn >= 0:
            turns.append((time.perf_counter() - wall_s, time.process_time() - cpu_s))
    current.survivors = survivors
    return turns


def summarise_overhead(
    pp: int, width: int, of_ranks: list[list[tuple[float, float]]], benchmark: str = "going_on"
) -> dict[str, Any]:
    """Returns the medians of the ratios of neighbouring turns."""
    wall = [max(own[turn][0] for own in of_ranks) for turn in range(len(of_ranks[0]))]
    cpu = [sum(own[turn][1] for own in of_ranks) for turn in range(len(of_ranks[0]))]
    return {
        "benchmark": benchmark,
        "case": "overhead",
        "pp": pp,
        "dp": len(of_ranks) // pp,
        "width": width,
        "step_ms": statistics.median(wall[1::2]) * 1e3 / TURN,
        "wall_ratio": statistics.median(a / b for a, b in zip(wall[::2], wall[1::2], strict=True)),
        "cpu_ratio": statistics.median(a / b for a, b in zip(cpu[::2], cpu[1::2], strict=True)),
        "num_turns": len(wall),
    }


def summarise_stall(found: list[dict[str, float]], benchmark: str = "going_on") -> dict[str, Any]:
    """Returns medians by part, and of the whole."""
    totals = [sum(parts.values()) for parts in found]
    return {
        "benchmark": benchmark,
        "case": "stall",
        "repeats": len(found),
        **{f"{name}_s": statistics.median(parts[name] for parts in found) for name in PARTS},
        "median_s": statistics.median(totals),
        "worst_s": max(totals),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("stall", "overhead", "torchft"), help="this case alone")
    parser.add_argument("--repeats", type=int, default=5, help="of each place of death")
    parser.add_argument("--turns", type=int, default=40, help="turns of ten steps")
    args = parser.parse_args()
    from benchmarks import going_on  # workers find the function by the name of its module

    pool, where = Pool(), describe()
    if args.only in (None, "stall"):
        found = [stall(pool, p, n % 4) for n in range(args.repeats) for p in PLACES]
        print(json.dumps(summarise_stall(found) | {"environment": where}), flush=True)
    if args.only in (None, "overhead"):
        for pp, width in ((1, 64), (1, 1024), (2, 64), (2, 1024)):
            turns = pool.run(2 * pp, going_on.overhead, pp, width, args.turns)
            result = summarise_overhead(pp, width, turns) | {"environment": where}
            print(json.dumps(result), flush=True)
    if args.only == "torchft":
        print(json.dumps(beside_torchft(pool, args.repeats) | {"environment": where}), flush=True)
    pool.close()


if __name__ == "__main__":
    main()
