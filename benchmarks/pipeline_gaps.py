"""Splits the time of a step into its parts: ``python benchmarks/pipeline_gaps.py TRACE.json``.

Reads what `pipeline.py --trace` has written. Each rank and step has: milliseconds in forwards,
backwards, gradients of weights, and work outside of the schedule's actions; idle before the first
task, between tasks by what ended the gap, and after the last one. With ``--order`` also the
actions, each with begin and end.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_KINDS = ("forward", "backward", "weight gradients")
# Gaps that are shorter are counted together: a message, a switch of threads.
_SHORT_MS = 1.0

Box = dict[str, Any]


def steps_of(boxes: list[Box]) -> Iterator[tuple[int, int, list[Box]]]:
    """Step, rank and tasks by begin."""
    groups: dict[tuple[int, int], list[Box]] = defaultdict(list)
    for box in boxes:
        groups[box["args"]["step"], box["pid"]].append(box)
    for (step, rank), tasks in sorted(groups.items()):
        yield step, rank, sorted(tasks, key=lambda box: box["ts"])


def parts_of(tasks: list[Box], idle: list[Box], begin: float, end: float) -> dict[str, float]:
    """Milliseconds of one rank in one step.

    Args:
        tasks, idle: boxes by begin.
        begin, end: times at which the step begins and ends on all ranks, in microseconds.
    """
    parts: dict[str, float] = defaultdict(float)
    for box in tasks:
        is_body = box["args"]["module"] == ""
        parts["body " + box["cat"] if is_body else box["cat"]] += box["dur"] / 1e3
    parts["before the first"] = (tasks[0]["ts"] - begin) / 1e3
    parts["after the last"] = (end - tasks[-1]["ts"] - tasks[-1]["dur"]) / 1e3
    for box in idle:
        if not tasks[0]["ts"] < box["ts"] + box["dur"] <= tasks[-1]["ts"] + 0.01:
            continue
        ms = box["dur"] / 1e3
        parts["short gaps" if ms < _SHORT_MS else f"waits for {box['name']}"] += ms
    return dict(parts)


def actions_of(tasks: list[Box]) -> Iterator[tuple[str, float, float]]:
    """Tasks of one phase and microbatch that follow each other are one action."""
    name, begin, end = "", 0.0, 0.0
    for box in tasks:
        action = f"{'FBW'[_KINDS.index(box['cat'])]}{box['args']['microbatch']}"
        if action != name:
            if name:
                yield name, begin, end
            name, begin = action, box["ts"]
        end = box["ts"] + box["dur"]
    yield name, begin, end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--order", action="store_true", help="all actions with their times")
    args = parser.parse_args()
    events = json.loads(args.trace.read_text())["traceEvents"]
    boxes = [e for e in events if e["ph"] == "X" and e.get("cat") in _KINDS and e["tid"] == 0]
    idle = [e for e in events if e["ph"] == "X" and e.get("cat") == "idle"]
    spans: dict[int, tuple[float, float]] = {}
    for step, _, tasks in steps_of(boxes):
        begin, end = spans.get(step, (float("inf"), 0.0))
        last = max(box["ts"] + box["dur"] for box in tasks)
        spans[step] = (min(begin, tasks[0]["ts"]), max(end, last))
    for step, rank, tasks in steps_of(boxes):
        begin, end = spans[step]
        own = [e for e in idle if e["pid"] == rank and e["args"]["step"] == step]
        print(f"step {step} rank {rank}: {(end - begin) / 1e3:.1f} ms")
        for name, ms in parts_of(tasks, own, begin, end).items():
            print(f"    {ms:9.1f}  {name}")
        if args.order:
            for name, first, last in actions_of(tasks):
                print(f"    {name:5} {(first - begin) / 1e3:9.1f} {(last - begin) / 1e3:9.1f}")


if __name__ == "__main__":
    main()
