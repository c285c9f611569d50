"""Compares results of a layout with those of one process. Pure functions of records.

Three rules define rounding. In float64 a difference of up to 1e-6 is rounding, which allows for
modules that compute in float32 inside. In float32 a difference above 1e-5 is computed again in
float64, which decides. With 16 bits both are compared with one process in float64: the error of the
layout may be up to four times the error of one process in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smp.commands.verify.records import Copies, Records, Stage

EXACT = 1e-6
NEAR = {"torch.float64": EXACT, "torch.float32": 1e-5}
_RATIO = 4.0
_FLOOR = 1e-3  # share of the largest of a kind: smaller quantities may be rounding errors only
_KINDS = ("value", "output", "gradient", "parameter", "optimizer", "buffer")


@dataclass(frozen=True)
class Difference:
    """A quantity that differs from that of one process.

    Attributes:
        what: "begin", "step" or "update".
        number: number of the step or update, counted from 0.
        kind: "output", "gradient", "parameter", "optimizer", "setting", "buffer" or "value".
        name: name of the parameter, output or entry.
        share: norm of the difference over that of the quantity; with 16 bits over the error of one
            process.
        text: the two sides in words.
    """

    what: str
    number: int
    kind: str
    name: str
    share: float
    text: str


@dataclass(frozen=True)
class FirstModule:
    """The first module, in the order of one process, with another result.

    Attributes:
        name: name in the model; "(root)" is the model itself.
        microbatch: number of the microbatch in its batch.
        batch: data-parallel rank of the batch.
        place: words for the rank that ran it.
        share: norm of the difference over that of the result.
    """

    name: str
    microbatch: int
    batch: int
    place: str
    share: float


@dataclass
class Comparison:
    """The comparison of one layout with one process.

    Attributes:
        differences: differences in the order of time, the largest of a stage first.
        largest: largest share by kind.
        module: first module that differs; None if results of modules agree, or have no comparison.
        copies: ranks whose copies of a tensor differ, or None.
        unknown: parameters that are not compared, because the layout has other names for them.
    """

    differences: list[Difference] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=dict)
    module: FirstModule | None = None
    copies: Copies | None = None
    unknown: list[str] = field(default_factory=list)


def compare(
    layout: Records, one: Records, limit: float, truth: Records | None = None
) -> Comparison:
    """Compares all that was recorded.

    Args:
        layout: records of the layout.
        one: records of one process with the same inputs.
        limit: the largest share that is rounding.
        truth: records of one process in float64; if given, the ratio rule decides.
    """
    found = Comparison()
    replicas = layout.replicas
    exact = None if truth is None else list(truth.stages([0]))
    for replica in replicas:
        expected = list(one.stages([0]))
        place = layout.facts[replica[0]]["place"] if len(replicas) > 1 else ""
        for i, (real, other) in enumerate(zip(layout.stages(replica), expected, strict=False)):
            if replica is not replicas[0]:  # outputs of all batches were compared with the first
                other.items = {k: v for k, v in other.items.items() if k[0] != "output"}
            if (real.what, real.number) != (other.what, other.number):
                text = f"{real.what} {real.number} instead of {other.what} {other.number}"
                order = "order of steps and updates"
                found.differences.append(
                    Difference(other.what, other.number, "setting", order, float("inf"), text)
                )
                break
            third = None if exact is None else exact[i]
            found.differences += _differences(real, other, third, limit, found, place)
    found.differences.sort(key=_time)
    found.copies = layout.apart()
    steps = [d.number for d in found.differences if d.what == "step"]
    if steps and truth is None:
        found.module = first_module(layout, one, min(steps), limit)
    return found


def _time(difference: Difference) -> tuple[Any, ...]:
    order = {"begin": 0, "step": 1, "update": 2}[difference.what]
    at = (difference.number, order) if difference.what != "begin" else (-1, 0)
    kinds = ("value", "setting", "output", "gradient", "parameter", "optimizer", "buffer")
    return (*at, kinds.index(difference.kind), -difference.share)


def _differences(
    real: Stage,
    one: Stage,
    truth: Stage | None,
    limit: float,
    found: Comparison,
    place: str,
) -> list[Difference]:
    where = f" on {place}" if place else ""
    result = [
        Difference(real.what, real.number, "setting", name, float("inf"), text)
        for name, text in _settings(real.settings, one.settings)
    ]
    for kind in _KINDS:
        keys = [key for key in one.items if key[0] == kind]
        floor = _FLOOR * max((float(one.items[k].norm()) for k in keys), default=0.0)
        for key in keys:
            value = real.items.get(key)
            if value is None and kind in ("gradient", "parameter", "optimizer"):
                value = torch.zeros_like(one.items[key])
                if not float(one.items[key].norm()):
                    continue
            if value is None:
                if key[1] not in found.unknown:
                    found.unknown.append(key[1])
                continue
            slack = one.slack.get(key, 0.0)
            exact = None if truth is None else truth.items.get(key)
            share = share_of(value, one.items[key], floor, slack)
            most = limit
            if exact is not None:
                share, most = ratio_of(value, one.items[key], exact, floor, slack), _RATIO
            found.largest[kind] = max(found.largest.get(kind, 0.0), share)
            if not share <= most:
                text = in_words(value, one.items[key]) + where
                result.append(Difference(real.what, real.number, *key, share, text))
    return result


def share_of(real: Tensor, expected: Tensor, floor: float, slack: float = 0.0) -> float:
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


def ratio_of(real: Tensor, one: Tensor, exact: Tensor, floor: float, slack: float) -> float:
    """Returns the layout's distance from the exact value over that of one process."""
    if real.shape != exact.shape:
        return float("inf")
    error = float((real - exact).norm())
    if error != error:
        return 0.0 if bool((one - exact).isnan().any()) else float("inf")
    # Smaller errors are not expected of 16 bits.
    least = max(float((one - exact).norm()), 1e-3 * float(exact.norm()), floor * 1e-2, slack)
    return error / least if least else (float("inf") if error else 0.0)


def in_words(real: Tensor, expected: Tensor) -> str:
    """Describes both sides of a difference."""
    if real.shape != expected.shape:
        return f"shape {tuple(real.shape)} instead of {tuple(expected.shape)}"
    if real.numel() == 1:
        return f"{float(real):.8g} instead of {float(expected):.8g}"
    words = f"norm {float(real.norm()):.6g} instead of {float(expected.norm()):.6g}"
    size = float(expected.norm()) ** 2
    factor = float((real * expected).sum()) / size if size else 0.0
    if (
        size
        and abs(factor - 1) > 1e-3
        and float((real - factor * expected).norm()) < 1e-6 * size**0.5
    ):
        words += f" ({factor:.4g} times it)"
    return words


def _settings(
    real: Sequence[Mapping[str, Any]], one: Sequence[Mapping[str, Any]]
) -> Iterable[tuple[str, str]]:
    for number, (group, expected) in enumerate(zip(real, one, strict=False)):
        for key in expected:
            if key in group and group[key] != expected[key]:
                yield f"'{key}' of group {number}", f"{group[key]!r} instead of {expected[key]!r}"


def first_module(layout: Records, one: Records, step: int, limit: float) -> FirstModule | None:
    """Returns the first module with another result in a step, or None.

    Results of other shapes (halves of split layers) are not compared.
    """
    counts: list[int] = one.load(0, f"step{step}")["counts"]
    if len(counts) == 1 and layout.num_batches > 1:
        return None
    seen = layout.modules(step, counts)
    for (mb, name, call), [(_, expected)] in one.modules(step, counts).items():
        for place, rows in seen.get((mb, name, call), []):
            share = _share_of_rows(rows, expected)
            if share > limit:
                batch = next(d for d in range(len(counts)) if mb < sum(counts[: d + 1]))
                own = mb - sum(counts[:batch])
                return FirstModule(name or "(root)", own, batch, place, share)
    return None


def _share_of_rows(rows: Sequence[Any], expected: Sequence[Any]) -> float:
    shares = [
        share_of(row[1], other[1], 0.0)
        for row, other in zip(rows, expected, strict=False)
        if row is not None and other is not None and row[0] == other[0]
    ]
    return max(shares, default=0.0)


def last_module_of(gradients: Iterable[str], one: Records, step: int) -> str:
    """Returns the parameter that backward comes to first, of those whose gradients differ."""
    counts: list[int] = one.load(0, f"step{step}")["counts"]
    order = {name: i for i, (_, name, _) in enumerate(one.modules(step, counts))}
    return max(gradients, key=lambda name: order.get(name.rpartition(".")[0], -1))
