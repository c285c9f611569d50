"""Compares what a run has computed with what one process computes. Pure functions of records.

One rule decides, with two numbers: a difference counts if it is more than a share of the quantity's
norm, and, where a third recording shows the effect of rounding, more than some times that effect.
See docs/design/verify.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smp.observe.verification.recorder import Rows, Runs
from smp.observe.verification.rows import Row

_FLOOR = 1e-2  # share of the largest of a kind: smaller quantities may be rounding errors only
#: kinds of quantities, in the order in which a step computes them, and the words for a difference
_WORDS = {
    "value": "'{}' has another value:",
    "setting": "the optimizer's {} differs:",
    "form": "{} is",
    "output": "{} differs:",
    "gradient": "the gradient of '{}' differs:",
    "parameter": "parameter '{}' was changed in another way:",
    "optimizer": "the optimizer's {} differs:",
    "buffer": "buffer '{}' was changed in another way:",
}
_ORDER = {kind: number for number, kind in enumerate(_WORDS)}
#: kinds of quantities that are zero where nothing was recorded
_SUMS = ("gradient", "parameter", "optimizer")

#: kind of a quantity, and its name
Key = tuple[str, str]


@dataclass(frozen=True)
class Rule:
    """The rule for differences that are rounding.

    Attributes:
        limit: share of the norm of a quantity.
        margin: number of times the difference that a third recording shows.
    """

    limit: float
    margin: float = 0.0


@dataclass
class Stage:
    """Quantities of one step or update.

    Attributes:
        what: "begin", "step" or "update".
        number: number of the step or update, counted from 0.
        items: numbers in float64, by kind and name.
        slack: rounding errors of the values they were computed from, as a norm.
        facts: words that must be equal, by kind and name.
    """

    what: str = "step"
    number: int = 0
    items: dict[Key, Tensor] = field(default_factory=dict)
    slack: dict[Key, float] = field(default_factory=dict)
    facts: dict[Key, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """A quantity that differs from that of one process.

    Attributes:
        what, number: stage, as in `Stage`.
        kind, name: key of the quantity.
        share: norm of the difference over that of the quantity; with a third recording over the
            difference that this shows.
        text: the two sides in words.
    """

    what: str
    number: int
    kind: str
    name: str
    share: float
    text: str

    def order(self) -> tuple[Any, ...]:
        """Returns the place of the difference in time; the larger of one kind are first."""
        stage = {"begin": -1, "step": 0, "update": 1}[self.what]
        return (self.number, stage) if stage >= 0 else (-1, 0), _ORDER[self.kind], -self.share

    def words(self) -> str:
        return f"{_WORDS[self.kind].format(self.name)} {self.text}"


@dataclass(frozen=True)
class FirstModule:
    """The first module, in the order of one process, with another result.

    Attributes:
        name: name in the model; "(root)" is the model itself.
        mb: number of the microbatch.
        place: words for the rank that ran it.
        text: the two sides in words.
        after: first of the modules right before it whose results were not compared, as ranks have
            parts of them; None: the module before it agrees.
    """

    name: str
    mb: int
    place: str
    text: str
    after: str | None = None


def differences(
    real: Stage,
    base: Stage,
    rule: Rule,
    third: Stage | None = None,
    largest: dict[str, float] | None = None,
) -> Iterator[Difference]:
    """Yields the differences of two stages.

    Args:
        real: stage of the run.
        base: stage that it should be equal to. Gradients and the like are zero where they are not
            recorded; other quantities are passed over.
        rule: limits of rounding.
        third: stage whose distance from `base` is the effect of rounding.
        largest: dict that gets the largest share by kind.
    """
    for key, words in base.facts.items():
        found = real.facts.get(key, words)
        if found != words:
            text = f"{found} instead of {words}"
            yield Difference(real.what, real.number, *key, float("inf"), text)
    floors: dict[str, float] = {}
    for (kind, _), value in base.items.items():
        floors[kind] = max(floors.get(kind, 0.0), _FLOOR * _norm(value))
    for key in dict.fromkeys((*base.items, *(k for k in real.items if k[0] == "gradient"))):
        kind, sides = key[0], (real.items.get(key), base.items.get(key))
        if sides[0] is None and kind not in _SUMS:
            continue
        value, expected = _filled(*sides)
        floor, limit = floors.get(kind, 0.0), rule.limit
        slack = max(stage.slack.get(key, 0.0) for stage in (real, base))
        share = share_of(value, expected, floor, slack)
        if third is not None and key in third.items:
            effect = share_of(third.items[key], expected, floor)
            effect = max(effect, rule.limit / rule.margin)
            share, limit = 0.0 if effect == float("inf") else share / effect, rule.margin
        if largest is not None:
            largest[kind] = max(largest.get(kind, 0.0), share)
        if share > limit:
            text = "none came, " if sides[0] is None else ""
            text += in_words(value, expected)
            yield Difference(real.what, real.number, *key, share, text)


def _filled(real: Tensor | None, expected: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns both sides with zeros in place of None."""
    some = real if real is not None else expected
    assert some is not None
    nothing = torch.zeros_like(some)
    return nothing if real is None else real, nothing if expected is None else expected


def share_of(real: Tensor, expected: Tensor, floor: float = 0.0, slack: float = 0.0) -> float:
    """Returns the norm of the difference over that of the larger side, or inf if shapes differ.

    It is also inf if a value is not finite on one side only.
    """
    if real.shape != expected.shape:
        return float("inf")
    odd = ~real.isfinite() & ~expected.isfinite()
    real, expected = real.masked_fill(odd, 0.0), expected.masked_fill(odd, 0.0)
    distance = float((real - expected).norm())
    if distance != distance or distance == float("inf"):
        return float("inf")
    distance = max(0.0, distance - slack)
    size = max(float(real.norm()), float(expected.norm()), floor)
    return distance / size if distance else 0.0


def in_words(real: Tensor, expected: Tensor) -> str:
    """Describes both sides of a difference."""
    if real.shape != expected.shape:
        return f"shape {tuple(real.shape)} instead of {tuple(expected.shape)}"
    if real.numel() == 1:
        return f"{float(real):.8g} instead of {float(expected):.8g}"
    size = float(expected.norm())
    words = f"norm {float(real.norm()):.6g} instead of {size:.6g}"
    factor = float((real * expected).sum()) / size**2 if size else 1.0
    rest = float((real - factor * expected).norm())
    if factor and abs(factor - 1) > 1e-3 and rest < 1e-6 * size:
        return f"{words} ({factor:.4g} times it)"
    return f"{words}, the norm of the difference is {share_of(real, expected):.2g} of it"


def first_module(runs: Runs, one: Rows, limit: float) -> FirstModule | None:
    """Returns the first module with another result, or None.

    A rank may call a module for several others, in any order, so a result differs if it differs
    from that of each call in its microbatch. Results of other shapes (halves of split layers) are
    not compared.

    Args:
        runs: words for each rank, and results of modules that it ran.
        one: results of one process.
        limit: largest share that is rounding.
    """
    known: dict[tuple[int, str], list[tuple[str, list[list[Row | None]]]]] = {}
    for place, rows in runs:
        calls: dict[tuple[int, str], list[list[Row | None]]] = {}
        for (mb, name, _), own in rows.items():
            calls.setdefault((mb, name), []).append(own)
        for at, found in calls.items():
            known.setdefault(at, []).append((place, found))
    after: str | None = None
    for (mb, name, number), expected in one.items():
        are_parts = True
        for place, found in known.get((mb, name), []):
            worst = [_worst(own, expected) for own in found]
            if all(share > limit for share, _ in worst):
                pair = worst[min(number, len(worst) - 1)][1]
                return FirstModule(name or "(root)", mb, place, in_words(*pair), after)
            are_parts &= all(pair is None for _, pair in worst)
        after = (after or name or "(root)") if are_parts else None
    return None


def _worst(rows: Sequence[Row | None], expected: Sequence[Row | None]) -> tuple[float, Any]:
    """Returns the share of the largest difference of two results, and the numbers of both sides."""
    pairs = [
        (own.numbers, other.numbers)
        for own, other in zip(rows, expected, strict=False)
        if own is not None and other is not None and own.shape == other.shape
    ]
    return max(((share_of(*pair), pair) for pair in pairs), key=lambda x: x[0], default=(0.0, None))


def first_of(found: Sequence[Difference], one: Rows) -> tuple[Difference, int]:
    """Returns the difference to begin with, and the number of its kind.

    Args:
        found: differences in the order of time.
        one: results of modules in one process; of gradients that differ, the first is that of the
            module which backward comes to first.
    """
    first = found[0]
    at = (first.what, first.number, first.kind)
    same = [d for d in found if (d.what, d.number, d.kind) == at]
    if first.kind == "gradient":
        order = {name: number for number, (_, name, _) in enumerate(one)}
        first = max(same, key=lambda d: order.get(module_of(d.name), -1))
    return first, len(same)


def module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def describe(first: Difference, count: int, module: FirstModule | None, where: str = "") -> str:
    """Describes the first difference.

    Args:
        first: the difference.
        count: number of its kind.
        module: first module with another result, or None.
        where: words for the microbatch of that module.
    """
    text = first.words()
    if count > 1:
        text += f" (and {count - 1} more of its kind)"
    if module is not None:
        text += f"; first in the result of module '{module.name}' on {module.place}{where}: "
        text += module.text
    return text


def _norm(value: Tensor) -> float:
    return float(value.norm().nan_to_num(0.0, posinf=0.0))
