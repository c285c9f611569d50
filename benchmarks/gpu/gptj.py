"""Parts `gptj-layer` and `gptj-steps`: training of a GPT-J as wide as GPT-J-6B.

Each contender has its own process: after an error its memory is freed with it. A model that does
not fit has fewer layers, and each of its lines says how many of how many.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.gpu.arithmetic import USED, Shape, fitting, layers_share, mfu, peak_bytes
from benchmarks.gpu.contenders import CONTENDERS, Way, make_batch
from benchmarks.gpu.device import Device
from benchmarks.gpu.figures import Figures, Limit
from benchmarks.gpu.rows import Row
from tests.gpu.host_waits import waits_of

ROOF = Limit(least=0.75)  # of the measured product of matrices
MFU = Limit(least=0.6)
MATMUL = 8192


@dataclass(frozen=True)
class Variant:
    """A step's microbatches.

    Attributes:
        microbatch: sequences of a microbatch.
        recompute: each layer is recomputed in backward.
        microbatches: number of microbatches.
    """

    microbatch: int
    recompute: bool
    microbatches: int = 2

    def __str__(self) -> str:
        words = f"{self.microbatches} x {self.microbatch} sequences"
        return words + (", recomputing" if self.recompute else "")


@dataclass(frozen=True)
class Plan:
    """A plan of the measurements of a part.

    Attributes:
        variants: the most telling first.
        num_first: variants of `smp.nn` that are measured before all else.
        updates: whole steps are measured: optimizer, memory and waits, too.
        variant_s: about how long a variant takes; three times that with a compiler.
    """

    shape: Shape
    variants: tuple[Variant, ...]
    num_first: int
    updates: bool
    repeats: int
    variant_s: float


PLANS = {
    # The layer alone: a small vocabulary makes the ends of the model light.
    "gptj-layer": Plan(
        Shape(layers=1, vocab=512),
        (Variant(4, False), Variant(8, True), Variant(8, False), Variant(4, True)),
        1,
        False,
        10,
        12.0,
    ),
    # The update counts once a step: with more microbatches it weighs less.
    "gptj-steps": Plan(
        Shape(),
        (
            Variant(4, False),
            Variant(4, False, 8),
            Variant(8, True),
            Variant(8, False),
            Variant(4, True),
        ),
        2,
        True,
        2,
        40.0,
    ),
}
TINY = Shape(layers=2, hidden=32, heads=2, rotary=8, vocab=64, seq=16)


def plan_of(part: str, is_dry: bool) -> Plan:
    """The plan of a part; that of a dry run is tiny."""
    plan = PLANS[part]
    if is_dry:
        layers = min(plan.shape.layers, TINY.layers)
        return replace(plan, shape=replace(TINY, layers=layers), repeats=1, variant_s=5.0)
    return plan


def layers_words(layers: int, whole: int) -> str:
    """Says how many layers a model has, and of how many if some were left out."""
    if layers == whole:
        return "1 layer" if layers == 1 else f"all {layers} layers"
    return f"{layers} of {whole} layers"


def measure(figures: Figures, name: str, plan: Plan, way: Way, words: str) -> None:
    """Measures one variant of one contender."""
    device, is_ours = figures.device, name == "smp.nn"
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
        speed(figures, words, way, seconds, is_ours)
        if plan.updates:
            memory_and_waits(figures, words, way, step, is_ours)
        # The loss of the same batch is smaller now if the contender trains.
        contender.update()
        last = float(contender.compute(batch))
        figures.add(f"{words}: first loss", first, "")
        figures.add(f"{words}: change of the loss", last - first, "", bound=Limit(most=-1e-4))


def roof_of(device: Device) -> float:
    return device.matmul_rate(64 if device.is_dry else MATMUL)


def speed(figures: Figures, words: str, way: Way, seconds: float, is_ours: bool) -> None:
    """Tokens and operations per second, and the time of a layer."""
    shape = way.shape
    tokens_per_s = shape.seq * way.microbatch * way.microbatches / seconds
    figures.add(f"{words}: tokens per second", tokens_per_s, "tokens/s")
    share = layers_share(shape)
    figures.add(
        f"{words}: a layer and microbatch",
        seconds * share / shape.layers / way.microbatches * 1e3,
        "ms",
        note=f"{100 * share:.0f} % of the operations are those of the layers",
    )
    of_roof = mfu(tokens_per_s, shape, roof_of(figures.device))
    figures.add(f"{words}: share of the roof", of_roof, "", expected=ROOF if is_ours else None)
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


def fit(figures: Figures, words: str, whole: Shape, variant: Variant) -> Shape:
    """Returns the shape with as many layers as fit; says so in a line, and why."""
    memory = figures.device.memory_bytes
    shape = fitting(whole, variant.microbatch, variant.recompute, memory)
    wanted = peak_bytes(whole, variant.microbatch, variant.recompute)
    figures.add(
        f"{words}: layers that fit",
        shape.layers,
        f"of {whole.layers}",
        note=f"{whole.layers} take {wanted / 1e9:.0f} GB by the formula, "
        f"{USED:g} of the memory is {USED * memory / 1e9:.0f} GB",
    )
    return shape


def run_variant(figures: Figures, name: str, variant: Variant) -> None:
    """Measures one variant of one contender, with as many layers as fit."""
    plan = plan_of(figures.part, figures.device.is_dry)
    shape = plan.shape
    if plan.updates:
        shape = fit(figures, f"{name}, {variant}", shape, variant)
    words = f"{name}, {layers_words(shape.layers, plan.shape.layers)}, {variant}"
    way = Way(shape, variant.microbatch, variant.microbatches, variant.recompute)
    with figures.measuring(words):
        try:
            measure(figures, name, plan, way, words)
        except Exception as error:
            if "out of memory" not in str(error):
                raise
            # The formula says that it fits, for attention that keeps no probabilities.
            tell = figures.miss if name == "smp.nn" else figures.skip
            tell(words, "out of memory")


def measure_roof(figures: Figures) -> None:
    roof = roof_of(figures.device)
    figures.add("roof, a product of matrices", roof / 1e12, "TFLOP/s")


def order_of(part: str, is_dry: bool) -> list[tuple[str, Variant]]:
    """Contenders and variants, the most telling first; a dry run leaves out the others.

    The compiler is in one dry run only.
    """
    plan = plan_of(part, is_dry)
    ours, *others = CONTENDERS
    first = [(ours, variant) for variant in plan.variants[: plan.num_first]]
    first += [(name, plan.variants[0]) for name in others]
    if is_dry:
        return [pair for pair in first if part == "gptj-layer" or "compiled" not in pair[0]]
    every = [(name, variant) for name in CONTENDERS for variant in plan.variants]
    return first + [pair for pair in every if pair not in first]


def rows(part: str, is_dry: bool) -> list[Row]:
    variant_s = plan_of(part, is_dry).variant_s
    found = []
    for name, variant in order_of(part, is_dry):
        needed_s = variant_s * (3 if "compiled" in name else 1)
        work = functools.partial(run_variant, name=name, variant=variant)
        process = "dry" if is_dry else name
        found.append(Row(f"{name}, {variant}", work, needed_s, max(120.0, 2 * needed_s), process))
    return [Row("roof", measure_roof, process=found[0].process), *found]
