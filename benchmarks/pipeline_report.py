"""Evaluates the samples of `pipeline`; called on all ranks, rank 0 emits."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pipeline_contenders import Case, OneProcess
from stage_clock import StageCosts
from timer import Timing, compare
from workers import Worker

import smp
from smp.pipeline.schedules import Stage, simulate

AIMS = {
    "ratio_to_1f1b": 0.97,
    "ratio_to_ideal": 1.05,
    "cpu_ratio_to_one_process": 1.05,
    "memory_ratio_to_1f1b": 1.0,
}
"""The most that is accepted of the figures of smp."""
MAX_PREDICTION_ERROR = 0.1
LOSS_TOLERANCE = 1e-3

Samples = Any  # pipeline_worker.Samples


def report(
    worker: Worker,
    case: Case,
    samples: Mapping[str, Samples],
    one: OneProcess,
    owner_of: Mapping[str, int],
) -> None:
    """Emits one result per contender."""
    mine = {name: asdict(of_one) for name, of_one in samples.items()}
    by_rank = smp.allgather((mine, one.costs), smp.PP_GROUP)
    if smp.pp_rank() != 0:
        return
    ranks = [part for part, _ in by_rank]
    base = base_of(worker, case)
    costs = median_costs([c for _, part in by_rank for c in part], case.num_ranks)
    alone = median_costs(by_rank[0][1], case.num_ranks)
    check_losses(ranks)
    theirs, ours = common(ranks, "torch_1f1b"), common(ranks, "smp")
    one_cpu_s = [s / one.count for part in ranks for s in one_process_cpu(part)]
    cpu_s_one = statistics.median(one_cpu_s) * case.microbatches
    own = {
        **own_figures(worker, case, ranks, costs, alone, cpu_s_one),
        **against_1f1b(ranks),
        "partition": boundary(owner_of),
    }
    theirs["cpu_ratio_to_one_process"] = theirs["cpu_s"] / cpu_s_one
    worker.emit("torch_1f1b", {**base, **theirs})
    worker.emit("smp", {**base, **ours, **own})
    kernel = kernel_per_microbatch(ranks, one.count)
    worker.emit("one_process", {**base, "cpu_s": cpu_s_one, **kernel, **costs_ms(alone, costs)})


def report_pipelines(
    worker: Worker, case: Case, samples: Mapping[str, Samples], owner_of: Mapping[str, int]
) -> None:
    """The same without the model in one process."""
    ranks = smp.allgather({name: asdict(of_one) for name, of_one in samples.items()}, smp.PP_GROUP)
    if smp.pp_rank() != 0:
        return
    check_losses(ranks)
    base = base_of(worker, case)
    own = {**against_1f1b(ranks), "partition": boundary(owner_of)}
    worker.emit("torch_1f1b", {**base, **common(ranks, "torch_1f1b")})
    worker.emit("smp", {**base, **common(ranks, "smp"), **own})


def base_of(worker: Worker, case: Case) -> dict[str, Any]:
    keys = ("pipeline", "active", "memory_weight")
    return {
        "model": case.kind,
        "microbatches": case.microbatches,
        "load": os.getloadavg()[0],
        **{key: worker.config[key] for key in keys},
    }


def against_1f1b(ranks: Sequence[Mapping[str, Samples]]) -> dict[str, Any]:
    ours, theirs = (common(ranks, name)["peak_mb"] for name in ("smp", "torch_1f1b"))
    pairs = compare(timing(ranks, "smp"), timing(ranks, "torch_1f1b"))
    return {
        **{f"1f1b_{name}": value for name, value in pairs.items()},
        "ratio_to_1f1b": pairs["ratio_median"],
        "memory_ratio_to_1f1b": max(ours) / max(theirs),
        "memory_ratios": [a / b for a, b in zip(ours, theirs, strict=True)],
    }


def timing(ranks: Sequence[Mapping[str, Samples]], name: str) -> Timing:
    return Timing(tuple(ranks[0][name]["step_s"]))


def common(ranks: Sequence[Mapping[str, Samples]], name: str) -> dict[str, Any]:
    """Figures that both pipelines have; lists are by rank."""
    parts = [part[name] for part in ranks]
    step_s = parts[0]["step_s"]
    cpu_s = [sum(values) for values in zip(*(part["cpu_s"] for part in parts), strict=True)]
    idle_s = [
        statistics.median(s - c for s, c in zip(step_s, part["cpu_s"], strict=True))
        for part in parts
    ]
    return {
        **timing(ranks, name).summary(prefix="step_"),
        "cpu_s": statistics.median(cpu_s),
        "idle_ms": [s * 1e3 for s in idle_s],
        "cpu_ms": [statistics.median(part["cpu_s"]) * 1e3 for part in parts],
        "system_ms": [statistics.median(part["system_s"]) * 1e3 for part in parts],
        "page_faults": [int(statistics.median(part["page_faults"])) for part in parts],
        "peak_mb": [(part["own_bytes"] + max(part["peak_bytes"])) / 1e6 for part in parts],
        "step_peak_mb": [max(part["peak_bytes"]) / 1e6 for part in parts],
        "kept_mb": [part["own_bytes"] / 1e6 for part in parts],
    }


def own_figures(
    worker: Worker,
    case: Case,
    ranks: Sequence[Mapping[str, Samples]],
    costs: StageCosts,
    alone: StageCosts,
    cpu_s_one: float,
) -> dict[str, Any]:
    """Figures of smp alone."""
    step_s = timing(ranks, "smp").median_s
    simulation = simulate(
        [
            Stage(r, costs.forward_s[r] * 1e3, costs.backward_s[r] * 1e3, 0.0, costs.kept_bytes[r])
            for r in range(case.num_ranks)
        ],
        case.microbatches,
        worker.config["pipeline"],
        active_microbatches=worker.config["active"],
    )
    peaks = [max(part["smp"]["peak_bytes"]) for part in ranks]
    counters = [part["smp"]["counters"] for part in ranks]
    per_mb = {
        f"{name}_per_microbatch": [c[name] / case.microbatches for c in counters]
        for name in ("bytes_sent", "headers", "remote_calls", "pushes", "fetches")
    }
    cpu_s = [sum(v) for v in zip(*(part["smp"]["cpu_s"] for part in ranks), strict=True)]
    return {
        "ratio_to_ideal": step_s / ideal_s(costs, case.microbatches),
        "ratio_to_ideal_alone": step_s / ideal_s(alone, case.microbatches),
        "cpu_ratio_to_one_process": statistics.median(cpu_s) / cpu_s_one,
        "ratio_to_simulated": step_s * 1e3 / simulation.makespan_ms,
        "activation_ratio_to_simulated": [
            peak / ((rank.peak_activations - 1) * kept + top)
            for peak, rank, kept, top in zip(
                peaks, simulation.ranks, costs.kept_bytes, costs.peak_bytes, strict=True
            )
        ],
        "simulated_peak_activations": [rank.peak_activations for rank in simulation.ranks],
        "server_idle_ms": [c["idle_s"] * 1e3 for c in counters],
        **per_mb,
    }


def ideal_s(costs: StageCosts, microbatches: int) -> float:
    """Every microbatch through all stages, then the others through the slowest."""
    stages = [f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True)]
    return sum(stages) + (microbatches - 1) * max(stages)


def median_costs(costs: Sequence[StageCosts], num_ranks: int) -> StageCosts:
    def median(values: Sequence[Sequence[float]]) -> tuple[Any, ...]:
        return tuple(statistics.median(v[r] for v in values) for r in range(num_ranks))

    return StageCosts(
        median([c.forward_s for c in costs]),
        median([c.backward_s for c in costs]),
        tuple(int(b) for b in median([c.kept_bytes for c in costs])),
        # Gradients of parameters are new in the first microbatch only.
        tuple(min(c.peak_bytes[r] for c in costs) for r in range(num_ranks)),
    )


def one_process_cpu(part: Mapping[str, Samples]) -> list[float]:
    """Returns CPU seconds of steps of the model in one process.

    The other ranks do the same meanwhile, or nothing where that was not measured.
    """
    name = "one_process_everywhere" if "one_process_everywhere" in part else "one_process"
    return [
        s
        for s, loss in zip(part[name]["cpu_s"], part[name]["losses"], strict=True)
        if not math.isnan(loss)
    ]


def kernel_per_microbatch(ranks: Sequence[Mapping[str, Samples]], count: int) -> dict[str, Any]:
    parts = [part.get("one_process_everywhere", part["one_process"]) for part in ranks]
    return {
        "system_ms_per_microbatch": [
            statistics.median(part["system_s"]) * 1e3 / count for part in parts
        ],
        "page_faults_per_microbatch": [
            int(statistics.median(part["page_faults"]) / count) for part in parts
        ],
    }


def costs_ms(alone: StageCosts, costs: StageCosts) -> dict[str, Any]:
    return {
        "forward_ms": [s * 1e3 for s in costs.forward_s],
        "backward_ms": [s * 1e3 for s in costs.backward_s],
        "alone_forward_ms": [s * 1e3 for s in alone.forward_s],
        "alone_backward_ms": [s * 1e3 for s in alone.backward_s],
        "kept_mb": [b / 1e6 for b in costs.kept_bytes],
        "peak_mb": [b / 1e6 for b in costs.peak_bytes],
    }


def boundary(owner_of: Mapping[str, int]) -> str:
    """Lists where the owner changes in the order of the modules, e.g. ``1 from lm.h.4.mlp``."""
    changes, last = [], None
    for name, owner in sorted(owner_of.items(), key=lambda item: order_of(item[0])):
        if name and owner != last:
            changes.append(f"{owner} from {name}")
            last = owner
    return ", ".join(changes)


def order_of(name: str) -> list[tuple[int, Any]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def check_losses(ranks: Sequence[Mapping[str, Samples]]) -> None:
    """Raises unless all contenders train the same: the first losses agree."""
    ours, theirs = ranks[0]["smp"]["losses"][0], ranks[-1]["torch_1f1b"]["losses"][0]
    if not abs(ours - theirs) < LOSS_TOLERANCE * abs(theirs):
        raise RuntimeError(
            f"the contenders do not train the same: expected a first loss of {theirs} as in "
            f"torch_1f1b, smp has {ours}"
        )
