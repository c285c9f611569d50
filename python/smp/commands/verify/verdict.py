"""Describes the meaning of a comparison in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from smp.commands.verify.compare import Comparison, Difference, last_module_of
from smp.commands.verify.records import Records

EQUAL, ROUNDING, DIFFERS, RANDOM, FAILED = "equal", "rounding", "differs", "random", "failed"
GOOD = (EQUAL, ROUNDING)


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
        return self.answer in GOOD

    def to_json(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "answer": self.answer,
            "text": self.text,
            "largest": self.largest,
            "exact": self.exact,
            "module": self.module,
            "step": self.step,
            "hints": list(self.hints),
            "notes": list(self.notes),
        }


def counted(comparison: Comparison, num_batches: int) -> list[Difference]:
    """Returns the differences that count.

    Buffers do not count with several batches: each replica writes its own, and in one process they
    depend on all batches.
    """
    return [d for d in comparison.differences if d.kind != "buffer" or num_batches == 1]


def describe(
    layout: str, comparison: Comparison, real: Records, one: Records
) -> tuple[str, str | None, int | None, tuple[str, ...]]:
    """Describes the differences: text, module, step, hints."""
    found = counted(comparison, real.num_batches)
    first = found[0]
    at = {"begin": "before the first step", "step": f"step {first.number}"}.get(
        first.what, f"update {first.number}"
    )
    same = [
        d for d in found if (d.what, d.number, d.kind) == (first.what, first.number, first.kind)
    ]
    module = None if comparison.module is None else comparison.module.name
    if first.kind == "gradient":
        name = last_module_of([d.name for d in same], one, first.number)
        first = next(d for d in same if d.name == name)
        module = module or (name.rpartition(".")[0] or "(root)")
    elif module is None and first.kind == "parameter":
        module = first.name.rpartition(".")[0] or "(root)"
    words = {
        "value": f"'{first.name}' has another value",
        "setting": f"the optimizer's {first.name} differs",
        "output": f"{first.name} differs",
        "gradient": f"the gradient of '{first.name}' differs",
        "parameter": f"parameter '{first.name}' was changed in another way",
        "optimizer": f"the optimizer's {first.name} differs",
        "buffer": f"buffer '{first.name}' was changed in another way",
    }[first.kind]
    text = f"{at}: {words}: {first.text}"
    if len(same) > 1:
        text += f" (and {len(same) - 1} more of its kind)"
    if comparison.module is not None:
        where = comparison.module
        text += (
            f"; first in the result of module '{where.name}' in microbatch {where.microbatch}"
            f"{f' of data-parallel rank {where.batch}' if real.num_batches > 1 else ''}, on "
            f"{where.place}"
        )
    step = first.number if first.what == "step" else None
    if step is None and first.what == "update":
        step = one.load(0, f"update{first.number}")["steps"] - 1
    return text, module, step, tuple(_hints(comparison, first, real, one))


def _hints(comparison: Comparison, first: Difference, real: Records, one: Records) -> list[str]:
    hints = []
    if first.kind == "value":
        hints.append(
            "the script makes other values in another layout: seed each rank alike, and do not "
            "draw in an order that depends on the rank"
        )
    if first.kind == "setting":
        hints.append("the script computes it from the layout (for example from smp.dp_size())")
    if first.kind in ("parameter", "optimizer"):
        hints.append(
            "all gradients of the steps before agree, so the update is made in another way: "
            "something between the step function and optimizer.step(), such as clipping on one "
            "rank, depends on the layout"
        )
    copies = comparison.copies
    if copies is not None:
        hints.append(
            f"'{copies.name}' is not the same on {copies.places[0]} and {copies.places[1]} "
            "after the update: a sum of its gradient over these ranks is left out (a parameter "
            "that is marked wrongly, or a communication hook)"
        )
    where = comparison.module
    if where is not None and (where.microbatch > 0 or where.batch > 0) and first.number == 0:
        hints.append(
            f"microbatches before it agree: '{where.name}' or a module in it may keep something "
            "from one microbatch to the next"
        )
    elif where is not None:
        hints.append(
            f"what goes into '{where.name}' agrees: its code, or a mask or attribute that it "
            "reads, depends on the rank"
        )
    elif first.kind == "gradient" and copies is None:
        hints.append("all results of modules agree: a backward, or a sum of gradients, differs")
    return hints
