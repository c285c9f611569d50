"""Compares predictions of `smp plan` and `smp estimate` with measurements on this machine.

``python benchmarks/planning.py`` trains one GPT-2 under layouts of 2 to 8 processes on the CPU, one
thread each, with the same samples in each step. Predictions come from a hardware file that
`calibration.py` measures here before; nothing of the runs goes into them. At the end: Kendall's tau
of predicted and measured step times, and the largest error of the memory of any rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from allocation_meter import preloaded
from calibration import calibrate
from environment import REPO, describe
from planning_model import make_batch, make_model
from planning_report import compared, summary
from run import launch
from torch import nn

from smp.commands.arguments import traced_estimate
from smp.commands.models import LoadedModel, quiet_transformers
from smp.commands.split_form import split_form
from smp.config.schema import Config
from smp.planning import hardware
from smp.planning.hardware import Hardware
from smp.planning.layout import Layout
from smp.planning.run_cuts import Run, View
from smp.planning.search import Job, predict

SHAPE = {"n_layer": 8, "n_embd": 512, "n_head": 8, "n_positions": 128, "vocab_size": 4096}
SAMPLES = 8
TIMEOUT_S = 900
AIMS = {"tau": 0.8, "memory_error": 0.1}
LAYOUTS = (
    Layout(pp=2, microbatches=4, microbatch=2, active=2),
    Layout(pp=2, microbatches=8, microbatch=1, active=2, schedule="zero_bubble"),
    Layout(pp=2, microbatches=2, microbatch=4, active=2, checkpoints=True),
    Layout(pp=2, microbatches=1, microbatch=8, active=1),
    Layout(tp=2, microbatch=8, in_memory=True),
    Layout(tp=2, microbatch=2, microbatches=4, active=4),
    Layout(rdp=2, microbatch=4),
    Layout(rdp=2, shard=2, shards_parameters=True, microbatch=2, microbatches=2, active=2),
    Layout(rdp=2, shard=2, microbatch=4, checkpoints=True),
    Layout(pp=4, microbatches=8, microbatch=1, active=4),
    Layout(pp=4, microbatches=8, microbatch=1, active=8, chunks=2, schedule="virtual_interleaved"),
    Layout(pp=2, tp=2, microbatches=4, microbatch=2, active=2, in_memory=True),
    Layout(pp=2, rdp=2, microbatches=4, microbatch=1, active=2),
    Layout(tp=4, microbatches=2, microbatch=4, active=2, in_memory=True),
    Layout(rdp=4, microbatch=2),
    Layout(tp=2, rdp=2, microbatch=4),
    Layout(rdp=4, shard=4, shards_parameters=True, microbatch=2, checkpoints=True),
    Layout(pp=8, microbatches=8, microbatch=1, active=8),
    Layout(rdp=8, microbatch=1),
    Layout(pp=2, tp=2, rdp=2, microbatches=2, microbatch=2, active=2, in_memory=True),
)


@dataclass(frozen=True)
class Predicted:
    """Predictions for one layout, made before it runs.

    Attributes:
        step_s: time of a step by `smp plan`.
        plan_mb: memory of the fullest rank by `smp plan`.
        rank_mb: memory of each pipeline rank by `smp estimate`.
        shares: shares of the step's time, by the resource that bounds them.
    """

    step_s: float
    plan_mb: float
    rank_mb: list[float]
    shares: dict[str, float]


def case_of(layout: Layout) -> dict[str, Any]:
    """Returns the description of a layout that is sent to the worker."""
    return {
        "name": layout.text(),
        "config": layout.config(),
        "checkpoints": layout.checkpoints,
    }


def predictions(layouts: Sequence[Layout], device: Hardware) -> dict[str, Predicted]:
    """Predicts layouts as the commands do."""
    with jobs_on(device) as jobs:
        return {layout.text(): prediction(layout, jobs[layout.num_ranks]) for layout in layouts}


@contextmanager
def jobs_on(device: Hardware) -> Iterator[dict[int, Job]]:
    """Traces the model, whole and split, for each number of ranks.

    All ranks are on one host, with the cores of the hardware file.
    """
    ids = make_batch(SHAPE, 1)
    call = ((), {"input_ids": ids, "labels": ids})
    whole = View.of(meta_model(), call, device, "fp32")
    with split_form(meta_model()) as form:
        assert form is not None, "GPT-2 has a distributed form"
        split = View.of(form, call, device, "fp32")
        yield {
            ranks: Job(whole, device, ranks, ranks, device.memory_bytes, SAMPLES, "fp32", split)
            for ranks in (2, 4, 8)
        }


def meta_model() -> nn.Module:
    """Makes the model without memory for its weights."""
    with torch.device("meta"):
        return make_model(SHAPE).train()


def prediction(layout: Layout, job: Job) -> Predicted:
    """Predicts one layout by the plan and by the estimate."""
    plan, values = predict(job, layout), layout.config()
    run = Run(Config.from_dict(values), frozenset(values), layout.num_ranks, layout.checkpoints)
    own = make_batch(SHAPE, layout.microbatch)
    model = LoadedModel("gpt", meta_model(), lambda batch, seq: ((), {}), "gpt")
    stages = traced_estimate(model, (), {"input_ids": own, "labels": own}, run).stages
    return Predicted(
        plan.time.total,
        plan.peak_bytes / 1e6,
        [stage.held.peak / 1e6 for stage in stages],
        plan.shares(),
    )


def measured(layouts: Sequence[Layout], rounds: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Results of the workers by layout: one launch for each number of processes.

    Raises:
        RuntimeError: a run failed, or layouts do not train alike.
    """
    results: dict[str, dict[str, Any]] = {}
    for ranks in sorted({layout.num_ranks for layout in layouts}):
        cases = [case_of(layout) for layout in layouts if layout.num_ranks == ranks]
        config = {"shape": SHAPE, "samples": SAMPLES, "rounds": rounds, "cases": cases}
        found = launch(
            "planning_worker",
            ranks,
            config,
            preloaded(os.environ, REPO / "build" / "bench"),
            TIMEOUT_S,
            [f"--repeats={repeats}"],
        )
        for case, result in zip(cases, found, strict=True):
            results[case["name"]] = result | {"config": {**config, "cases": [case]}}
    first = next(iter(results.values()))["losses"]
    for name, result in results.items():
        if any(abs(a / b - 1) > 1e-3 for a, b in zip(result["losses"], first, strict=True)):
            raise RuntimeError(f"{name} trains otherwise: losses {result['losses']}, not {first}")
    return results


def show(results: Sequence[dict[str, Any]], total: dict[str, Any]) -> None:
    """A table for people, in the order of measured times."""
    for result in sorted(results, key=lambda result: result["median_ms"]):
        ratios = result["rank_ratios"]
        print(
            f"{result['contender']:<48} {result['median_ms']:7.0f} ms (predicted / measured "
            f"{result['time_ratio']:.2f}), {max(result['peak_mb']):6.1f} MB "
            f"(estimate {result['estimate_ratio']:.2f}, of ranks {min(ratios):.2f} to "
            f"{max(ratios):.2f}, plan {result['plan_ratio']:.2f})"
        )
    for name, value in total.items():
        print(f"    {name}: {value:.4g}" if isinstance(value, float) else f"    {name}: {value}")
    if total["tau"] < AIMS["tau"]:
        print(f"MISSED tau {total['tau']:.2f} (at least {AIMS['tau']})")
    for name in ("memory_error", "plan_memory_error"):
        if total[name] > AIMS["memory_error"]:
            print(f"MISSED {name} {total[name]:.3f} (at most {AIMS['memory_error']})")


def measured_before(path: Path, layouts: Sequence[Layout]) -> dict[str, dict[str, Any]]:
    """Reads lines of earlier runs by layout; a later line of a layout replaces an earlier one.

    Raises:
        ValueError: a layout is missing.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {line["contender"]: line for line in lines if line["benchmark"] == "planning"}
    missing = [layout.text() for layout in layouts if layout.text() not in found]
    if missing:
        raise ValueError(f"{path} has no {missing[0]!r}; expected all of {len(layouts)} layouts")
    return {layout.text(): found[layout.text()] for layout in layouts}


def hardware_of(path: Path) -> Hardware:
    """Reads the hardware of earlier runs from the last line of their file."""
    whole = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    return hardware.read(json.dumps(whole["hardware"]), str(path))


def with_predictions(
    results: Mapping[str, dict[str, Any]], predicted: Mapping[str, Predicted]
) -> list[dict[str, Any]]:
    """Lines with what was predicted and how it compares."""
    lines = []
    for name, result in results.items():
        found = predicted[name]
        line = result | {
            "predicted_ms": 1e3 * found.step_s,
            "plan_mb": found.plan_mb,
            "estimate_mb": found.rank_mb,
            "shares": found.shares,
        }
        lines.append(line | compared(line))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", type=Path, help="a calibrated file; else it is measured")
    parser.add_argument("--rounds", type=int, default=2, help="each begins all layouts anew")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of a round")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8], help="numbers of them")
    parser.add_argument(
        "--measured", type=Path, help="results of earlier runs: predict again, and run nothing"
    )
    parser.add_argument("--out", type=Path, default=REPO / "build" / "bench" / "planning.jsonl")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    environment = describe()
    if args.hardware is not None:
        device = hardware.load(str(args.hardware))
    elif args.measured is not None:
        device = hardware_of(args.measured)
    else:
        device = hardware.read(json.dumps(calibrate()), "this machine")
    layouts = [layout for layout in LAYOUTS if layout.num_ranks in args.ranks]
    if args.measured is None:
        results = measured(layouts, args.rounds, args.repeats)
        results = {name: line | {"environment": environment} for name, line in results.items()}
    else:
        results = measured_before(args.measured, layouts)
    with quiet_transformers():
        lines = with_predictions(results, predictions(layouts, device))
    total = summary(lines)
    with args.out.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
        whole = {"benchmark": "planning", "contender": "all", **total}
        file.write(json.dumps(whole | {"hardware": device.to_json()}) + "\n")
    show(lines, total)
    print(f"results are in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
