"""Compares the records of a layout with those of one process, and describes what differs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from smp.commands.verify.records import JobRecords
from smp.observe.verification.comparison import (
    Difference,
    FirstModule,
    Rule,
    describe,
    differences,
    first_module,
    first_of,
    module_of,
)
from smp.observe.verification.recorder import Rows, Runs

#: In float64 a difference is rounding up to this share: modules may compute in float32 inside.
EXACT = Rule(1e-6)
#: In float32, a larger difference is computed again in float64, which decides.
NEAR = Rule(1e-5)
#: Without results in float64, a smaller difference in float32 counts as rounding.
BY_SIZE = 1e-3
#: With 16 bits, a layout may be this many times as far from one process in float64 as one process
#: in 16 bits is. Errors below a share of a thousand are not expected of 16 bits.
HALF = Rule(4e-3, margin=4.0)
#: Results of modules with 16 bits are compared with one process in 16 bits.
ROUGH = 3e-2

# Kinds of quantities that are compared only where both have them.
_ONCE = ("value", "output", "buffer")
_HINTS = {
    "value": "the script makes other values in another layout: seed each rank alike, and do not "
    "draw in an order that depends on the rank",
    "setting": "the script computes it from the layout (for example from smp.dp_size())",
    "parameter": "all gradients of the steps before agree, so the update is made in another way: "
    "something between the step function and optimizer.step(), such as clipping on one rank, "
    "depends on the layout",
}
_HINTS["optimizer"] = _HINTS["parameter"]


EQUAL, ROUNDING, DIFFERS, RANDOM, FAILED = "equal", "rounding", "differs", "random", "failed"


@dataclass(frozen=True)
class Verdict:
    """The result for one layout.

    Attributes:
        layout: name of the layout.
        answer: "equal", "rounding", "differs", "random" (not comparable) or "failed".
        text: the differences, and the place of the first one; empty if there is none.
        largest: share of the largest difference by kind, in the script's own precision.
        exact: shares in float64, if it was computed; with 16 bits ratios to the error of one
            process.
        module: first module that differs.
        step: first call of a step function that differs, counted from 0.
        hints: possible reasons.
        notes: limits of the comparison.
    """

    layout: str
    answer: str
    text: str = ""
    largest: dict[str, float] = field(default_factory=dict)
    exact: dict[str, float] = field(default_factory=dict)
    module: str | None = None
    step: int | None = None
    hints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        return self.answer in (EQUAL, ROUNDING)

    def noted(self, note: str) -> Verdict:
        return replace(self, notes=(*self.notes, note))


@dataclass
class Comparison:
    """The comparison of one layout with one process.

    Attributes:
        real: records of the layout.
        one: records of one process with the same inputs and dtypes.
        differences: differences in the order of time, the largest of a stage first.
        largest: largest share by kind.
        unknown: parameters that are not compared, because the layout has other names for them.
        has_buffers: whether buffers differ that do not count.
    """

    real: JobRecords
    one: JobRecords
    differences: list[Difference] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    has_buffers: bool = False

    def may_be_random(self) -> bool:
        """Returns whether random numbers of a step can explain all differences."""
        return not any(d.kind in ("value", "setting") for d in self.differences)

    def described(self, result: Verdict, limit: float) -> Verdict:
        """Returns a verdict with a description of the differences.

        Args:
            result: verdict so far.
            limit: largest share of a module's result that is rounding.
        """
        first, rows, runs, counts = self.differences[0], Rows(), Runs(), list[int]()
        if first.what == "step":
            counts = self.one.counts(first.number)
            ((_, rows),) = self.one.modules(first.number, counts)
            if len(counts) > 1 or self.real.num_batches == 1:
                runs = self.real.modules(first.number, counts)
        first, count = first_of(self.differences, rows)
        module = first_module(runs, rows, limit)
        name, where = None, ""
        if module is not None:
            name = module.name
            batch = next(d for d in range(len(counts)) if module.mb < sum(counts[: d + 1]))
            where = f" in microbatch {module.mb - sum(counts[:batch])}"
            where += f" of data-parallel rank {batch}" if self.real.num_batches > 1 else ""
        elif first.kind in ("gradient", "parameter"):
            name = module_of(first.name) or "(root)"
        at = "before the first step" if first.what == "begin" else f"{first.what} {first.number}"
        return replace(
            result,
            answer=DIFFERS,
            text=f"{at}: {describe(first, count, module, where)}",
            module=name,
            step=None if first.what == "begin" else self.one.step_of(first.what, first.number),
            hints=self._hints(first, module),
        )

    def _hints(self, first: Difference, module: FirstModule | None) -> tuple[str, ...]:
        hints = [_HINTS[first.kind]] if first.kind in _HINTS else []
        copies = self.real.apart()
        if copies is not None:
            hints.append(
                "'{}' is not the same on {} and {} after the update: a sum of its gradient over "
                "these ranks is left out (a parameter that is marked wrongly, or a communication "
                "hook)".format(*copies)
            )
        if module is not None and module.mb > 0 and first.number == 0:
            hints.append(
                f"microbatches before it agree: '{module.name}' or a module in it may keep "
                "something from one microbatch to the next"
            )
        elif module is not None and module.after is not None:
            hints.append(
                f"results from '{module.after}' to '{module.name}' are parts on each rank that are "
                "not compared: one of these modules may differ"
            )
        elif module is not None:
            hints.append(
                f"what goes into '{module.name}' agrees: its code, or a mask or attribute that it "
                "reads, depends on the rank"
            )
        elif first.kind == "gradient" and copies is None:
            hints.append("all results of modules agree: a backward, or a sum of gradients, differs")
        return tuple(hints)


def compare(
    real: JobRecords, one: JobRecords, rule: Rule, third: JobRecords | None = None
) -> Comparison:
    """Compares all that was recorded.

    Buffers do not count with several batches: each replica writes its own, and in one process they
    depend on all batches.

    Args:
        real: records of the layout.
        one: records of one process with the same inputs.
        rule: limits of rounding.
        third: records of one process whose distance from `one` is the effect of rounding, or None.
    """
    found = Comparison(real, third or one)
    base = list(one.stages([0]))
    thirds = [None] * len(base) if third is None else list(third.stages([0]))
    replicas = real.replicas
    for replica in replicas:
        place = f" on {real.facts[replica[0]]['place']}" if len(replicas) > 1 else ""
        stages = real.stages(replica, has_outputs=replica is replicas[0])
        for own, expected, rounded in zip(stages, base, thirds, strict=False):
            if (own.what, own.number) != (expected.what, expected.number):
                text = f"{own.what} {own.number} instead of {expected.what} {expected.number}"
                name = "order of steps and updates"
                at = (expected.what, expected.number)
                found.differences.append(Difference(*at, "setting", name, float("inf"), text))
                break
            if replica is replicas[0]:
                others = [
                    n for kind, n in expected.items.keys() - own.items.keys() if kind in _ONCE
                ]
                found.unknown = list(dict.fromkeys([*found.unknown, *others]))
            for one_more in differences(own, expected, rule, rounded, found.largest):
                where = "" if one_more.kind == "output" else place
                found.differences.append(replace(one_more, text=one_more.text + where))
    if real.num_batches > 1:
        found.has_buffers = any(d.kind == "buffer" for d in found.differences)
        found.differences = [d for d in found.differences if d.kind != "buffer"]
    found.differences.sort(key=Difference.order)
    return found
