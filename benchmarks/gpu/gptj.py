"""Measures one contender of the parts `gptj-layer` and `gptj-28`, in its own process.

The memory of a contender that fails or is killed is freed with its process; its lines stay.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.gpu.arithmetic import Shape, fitting, mfu, peak_bytes
from benchmarks.gpu.contenders import CONTENDERS, Way, make_batch
from benchmarks.gpu.device import Device, matmul_flops_per_s
from benchmarks.gpu.figures import REPO, Figures, Limit, parser
from tests.gpu.host_waits import waits_of

ROOF = Limit(least=0.75)  # of the measured product of matrices
MFU = Limit(least=0.6)
MATMUL = 8192


@dataclass(frozen=True)
class Plan:
    """A plan of the measurements of a part.

    Attributes:
        updates: whole steps are measured: optimizer, memory and waits, too.
        variant_s: about how long a variant takes; three times that with a compiler.
    """

    shape: Shape
    microbatches: int
    updates: bool
    repeats: int
    variant_s: float


PLANS = {
    # The layer alone: a small vocabulary makes the ends of the model light.
    "gptj-layer": Plan(Shape(layers=1, vocab=512), 2, False, 10, 12.0),
    "gptj-28": Plan(Shape(), 2, True, 2, 40.0),
}
#: Sequences of a microbatch, and recomputation; the most telling first.
WAYS = ((4, False), (8, True), (8, False), (4, True))
TINY = Shape(layers=2, hidden=32, heads=2, rotary=8, vocab=64, seq=16)


def plan_of(part: str, device: Device) -> Plan:
    """The plan of a part; that of a dry run is tiny."""
    plan = PLANS[part]
    if device.is_dry:
        layers = min(plan.shape.layers, TINY.layers)
        return replace(plan, shape=replace(TINY, layers=layers), repeats=1, variant_s=5.0)
    return plan


def measure(figures: Figures, name: str, plan: Plan, way: Way, roof: float) -> None:
    """Measures one variant of one contender."""
    device = figures.device
    words = f"{name}, {way.shape.layers} layers, microbatch {way.microbatch}"
    words += ", recomputing" if way.recompute else ""
    with CONTENDERS[name](device, way) as contender:
        batch = make_batch(device, way)
        began = time.monotonic()
        first = float(contender.compute(batch))
        contender.update()
        figures.add(f"{words}: first step", time.monotonic() - began, "s")

        def step() -> None:
            contender.compute(batch)
            if plan.updates:
                contender.update()

        seconds = device.clock_seconds(step, plan.repeats)
        tokens = way.shape.seq * way.microbatch * way.microbatches
        speed(figures, words, way.shape, tokens / seconds, roof, is_ours=name == "smp.nn")
        if plan.updates:
            memory_and_waits(figures, words, way, step, is_ours=name == "smp.nn")
        # The loss of the same batch is smaller now if the contender trains.
        contender.update()
        last = float(contender.compute(batch))
        figures.add(f"{words}: first loss", first, "")
        figures.add(f"{words}: change of the loss", last - first, "", bound=Limit(most=-1e-4))


def speed(
    figures: Figures, words: str, shape: Shape, tokens_per_s: float, roof: float, is_ours: bool
) -> None:
    """Tokens and operations per second."""
    figures.add(f"{words}: tokens per second", tokens_per_s, "tokens/s")
    share = mfu(tokens_per_s, shape, roof)
    figures.add(f"{words}: share of the roof", share, "", expected=ROOF if is_ours else None)
    if (flops := figures.device.data_sheet_flops) is not None:
        value = mfu(tokens_per_s, shape, flops)
        figures.add(f"{words}: MFU", value, "", expected=MFU if is_ours else None)


def memory_and_waits(
    figures: Figures, words: str, way: Way, step: Callable[[], object], is_ours: bool
) -> None:
    """Measures a step's peak memory next to the formula, and calls for which the host waits."""
    formula = peak_bytes(way.shape, way.microbatch, way.recompute)
    peak = figures.device.peak_bytes(step)
    figures.add(f"{words}: peak memory", peak / 1e9, "GB", formula_gb=formula / 1e9)
    if is_ours:
        near = Limit(least=0.95, most=1.05)
        name = f"{words}: peak memory over the formula"
        figures.add(name, peak / formula, "", expected=near)
    waits = waits_of(step)
    figures.add(
        f"{words}: waits of the host in a step",
        len(waits),
        "calls",
        expected=Limit(most=0) if is_ours else None,
        calls={name: waits.count(name) for name in set(waits)},
    )


def run_contender(figures: Figures, name: str, plan: Plan) -> None:
    """Measures all variants of one contender."""
    device = figures.device
    roof = matmul_flops_per_s(device, 64 if device.is_dry else MATMUL)
    figures.add(f"{name}: roof, a product of matrices", roof / 1e12, "TFLOP/s")
    for microbatch, recompute in WAYS[:1] if device.is_dry else WAYS:
        words = f"{name}, microbatch {microbatch}{', recomputing' if recompute else ''}"
        needed_s = plan.variant_s * (3 if "compiled" in name else 1)
        if not figures.has_time(words, needed_s):
            continue
        with figures.measuring(words):
            shape = fitting(plan.shape, microbatch, recompute, device.memory_bytes)
            way = Way(shape, microbatch, plan.microbatches, recompute)
            try:
                measure(figures, name, plan, way, roof)
            except Exception as error:
                if "out of memory" not in str(error):
                    raise
                # The formula says that it fits, for attention that keeps no probabilities.
                tell = figures.miss if name == "smp.nn" else figures.skip
                tell(words, f"out of memory with {shape.layers} layers")
        gc.collect()
        device.free()


def groups_of(part: str, is_dry: bool) -> list[list[str]]:
    """Contenders of each process; a dry run takes one, and the compiler in one part only."""
    names = list(CONTENDERS)
    if not is_dry:
        return [[name] for name in names]
    return [[name for name in names if part == "gptj-layer" or "compiled" not in name]]


def body(figures: Figures) -> None:
    """Runs each contender in its own process, which writes into the same file."""
    groups = groups_of(figures.part, figures.device.is_dry)
    for index, group in enumerate(groups):
        # Time that a group does not need is given to the groups after it.
        limit_s = max(5.0, (figures.left_s() - 10.0) / (len(groups) - index))
        command = [sys.executable, "-m", "benchmarks.gpu.gptj", figures.part, *group]
        command += ["--out", str(figures.path.parent), "--device", figures.device.kind]
        command += ["--limit-s", str(limit_s)]
        words = " and ".join(group)
        try:
            status = subprocess.run(command, cwd=REPO, timeout=limit_s + 5.0).returncode
        except subprocess.TimeoutExpired:
            figures.fail(words, f"it did not end within {limit_s:.0f} s")
            continue
        if status != 0:
            figures.fail(words, f"its process ended with status {status}; see the log")


def main() -> int:
    arguments_of = parser(__doc__)
    arguments_of.add_argument("part", choices=sorted(PLANS))
    arguments_of.add_argument("contenders", choices=sorted(CONTENDERS), nargs="+")
    arguments = arguments_of.parse_args()
    device = Device(arguments.device)
    figures = Figures(arguments.part, arguments.out, device, arguments.limit_s, is_new=False)
    for name in arguments.contenders:
        run_contender(figures, name, plan_of(arguments.part, device))
    return 1 if figures.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
