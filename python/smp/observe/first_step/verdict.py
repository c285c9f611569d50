"""Compares what the ranks saw of the first microbatch with what one process computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smp.observe.first_step.records import Call

# Both sides do the same operations, so they differ in rounding at most.
_TOLERANCES = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4}
_HALF_TOLERANCE = 3e-2
# Gradients that are this much smaller than the largest one may be rounding errors only.
_FLOOR = 1e-2
# The pipeline may differ by this many times the effect of other last digits in one process, because
# it rounds in other places.
_MARGIN = 10.0


def tolerance_of(dtypes: Iterable[torch.dtype]) -> float:
    """Returns the tolerance of the coarsest of the dtypes of parameters and outputs."""
    known = [_TOLERANCES.get(d, _HALF_TOLERANCE) for d in dtypes if d.is_floating_point]
    return max(known, default=1e-4)


@dataclass
class OutputSeen:
    """A leaf of the model's output, on both sides.

    Attributes:
        name: position of the leaf, in words.
        kinds: descriptions that must be equal.
        sketches: sketches of both sides, or None where there are no numbers to compare.
        maker: module that returned the leaf in the reference, and its position there.
    """

    name: str
    kinds: tuple[Any, Any]
    sketches: tuple[Tensor | None, Tensor | None]
    maker: tuple[Call, int] | None


@dataclass
class Seen:
    """Observations of one rank.

    Attributes:
        place: the rank in words.
        pp_rank, tp_rank: coordinates of the rank.
        reason: reason why the check has no result; None: it has one.
        gradients: sketches by name of the parameter; None: no gradient came.
        records: sketches of the modules that it ran.
        reference: results of one process, on a driver.
    """

    place: str
    pp_rank: int
    tp_rank: int
    reason: str | None = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    records: dict[Call, list[Tensor | None]] = field(default_factory=dict)
    reference: ReferenceSeen | None = None


@dataclass
class ReferenceSeen:
    """Results of one process.

    Attributes:
        tolerance: tolerance by dtype.
        outputs: outputs of all calls, on both sides.
        own_outputs: sketches of all leaves of the reference.
        gradients: sketches as in `Seen`; None: there was no backward.
        records: sketches of all modules, in the order in which they returned.
        names: names of the modules.
        is_certain: whether the gradients that flow into the model are known one by one. If not,
            one output is, or is computed from, another one, and views and copies may separate them
            on one side only. Equal gradients are a result even then.
    """

    tolerance: float
    outputs: list[OutputSeen]
    own_outputs: list[Tensor | None]
    gradients: dict[str, Tensor | None] | None
    is_certain: bool
    records: dict[Call, list[Tensor | None]]
    names: Sequence[str]


@dataclass(frozen=True)
class Verdict:
    """The result of the comparison.

    Attributes:
        reason: reason why there is no answer; None: there is one.
        difference: difference in words; None: all is equal.
    """

    reason: str | None = None
    difference: str | None = None


def judge(seen: Sequence[Seen], moved: Sequence[ReferenceSeen | None] = ()) -> Verdict:
    """Compares all ranks with one process; gives the same answer for the same arguments.

    Args:
        seen: observations of all ranks.
        moved: reference of each rank with parameters moved by some units in the last place; a
            pipeline that differs by no more than such a reference is equal.
    """
    for own in seen:
        if own.reason is not None:
            return Verdict(reason=own.reason)
    for idx, driver in enumerate(seen):
        if driver.reference is None:
            continue
        peers = [own for own in seen if own.tp_rank == driver.tp_rank]
        comparison = _Comparison(driver.reference, peers, moved[idx] if moved else None)
        verdict = comparison.verdict()
        if verdict.reason is not None or verdict.difference is not None:
            return verdict
    return Verdict()


def agrees(first: ReferenceSeen, second: ReferenceSeen) -> bool:
    """Returns whether one process computes the same twice."""
    as_rank = Seen("", 0, 0, gradients=second.gradients or {})
    comparison = _Comparison(first, [as_rank])
    outputs = len(first.own_outputs) == len(second.own_outputs) and all(
        _differ(a, b, first.tolerance, 0.0) is None
        for a, b in zip(first.own_outputs, second.own_outputs, strict=True)
    )
    return outputs and comparison.differing_gradient() is None


class _Comparison:
    """A comparison of ranks with one process.

    Args:
        reference: results of the process.
        peers: observations of the ranks.
        moved: results with parameters moved by some units in the last place.
    """

    def __init__(
        self,
        reference: ReferenceSeen,
        peers: Sequence[Seen],
        moved: ReferenceSeen | None = None,
    ) -> None:
        self._reference = reference
        self._peers = peers
        self._moved = moved

    def _tolerance_of_gradient(self, name: str, floor: float) -> float:
        tolerance = self._reference.tolerance
        if self._moved is None:
            return tolerance
        first, second = (r.gradients or {} for r in (self._reference, self._moved))
        share = _share(_filled(second.get(name)), _filled(first.get(name)), floor)
        return max(tolerance, _MARGIN * share)

    def _tolerance_of_output(self, position: int, floor: float) -> float:
        tolerance = self._reference.tolerance
        if self._moved is None:
            return tolerance
        pairs = [r.own_outputs for r in (self._reference, self._moved)]
        first, second = (own[position] if position < len(own) else None for own in pairs)
        if first is None or second is None:
            return tolerance
        return max(tolerance, _MARGIN * _share(second, first, floor))

    def verdict(self) -> Verdict:
        output = self.first_output()
        gradient = self.differing_gradient(is_forward_equal=output is None)
        if output is None and gradient is None:
            return Verdict()
        if not self._is_finite():
            return Verdict(reason="what one process computes is not finite")
        if output is None and not self._reference.is_certain:
            return Verdict(
                reason="the loss is made of several outputs, one of which is made of another"
            )
        found = [self.first_module(), output, gradient]
        return Verdict(difference="; ".join(text for text in found if text is not None))

    def _is_finite(self) -> bool:
        sketches = [output.sketches[1] for output in self._reference.outputs]
        sketches += (self._reference.gradients or {}).values()
        return all(s is None or bool(s.isfinite().all()) for s in sketches)

    def first_output(self) -> str | None:
        reference = self._reference
        sizes = [_norm(o.sketches[1]) for o in reference.outputs]
        floor = _FLOOR * max(sizes, default=0.0)
        for position, output in enumerate(reference.outputs):
            if output.kinds[0] != output.kinds[1]:
                return f"{output.name} is {_words(output.kinds[0])} instead of " + _words(
                    output.kinds[1]
                )
            real, expected = output.sketches
            if real is None and output.maker is not None:
                real = self._recorded(*output.maker)
            tolerance = self._tolerance_of_output(position, floor)
            difference = _differ(real, expected, tolerance, floor)
            if real is not None and difference is not None:
                return f"{output.name} differs: {difference}"
        return None

    def _recorded(self, call: Call, position: int) -> Tensor | None:
        """Returns a rank's record of the only call of a module, or None."""
        if sum(idx == call[0] for idx, _ in self._reference.records) > 1:
            return None  # calls cannot be told apart if several ranks make them
        for peer in self._peers:
            rows = peer.records.get(call)
            if rows is not None and position < len(rows) and rows[position] is not None:
                return rows[position]
        return None

    def differing_gradient(self, is_forward_equal: bool = False) -> str | None:
        """Describes the worst gradient, or the first in backward order if outputs are equal."""
        reference = self._reference
        if reference.gradients is None:
            return None
        floor = _FLOOR * max(map(_norm, reference.gradients.values()), default=0.0)
        order = self._order() if is_forward_equal else {}
        found: list[tuple[int, float, str]] = []
        for name, expected in reference.gradients.items():
            # A parameter that was frozen by mistake is on no rank.
            holders = [peer for peer in self._peers if name in peer.gradients]
            real = holders[0].gradients[name] if holders else None
            share = _share(_filled(real), _filled(expected), floor)
            if share > self._tolerance_of_gradient(name, floor):
                where = f" on {holders[0].place}" if holders and holders[0].place else ""
                text = _in_words(_filled(real), _filled(expected), share)
                none = "none came, " if real is None else ""
                text = f"the gradient of '{name}'{where} differs: {none}{text}"
                found.append((order.get(name.rpartition(".")[0], -1), share, text))
        return max(found)[2] if found else None

    def _order(self) -> dict[str, int]:
        """Returns the position of each module's last return."""
        names = self._reference.names
        return {names[idx]: i for i, (idx, _) in enumerate(self._reference.records)}

    def first_module(self) -> str | None:
        """Describes the first module, in the order of one process, with a different result."""
        reference = self._reference
        for call, expected in reference.records.items():
            text = None
            for peer in self._peers:
                # Several ranks may call a module, in different orders.
                calls = [rows for known, rows in peer.records.items() if known[0] == call[0]]
                texts = [_differing_rows(rows, expected, reference.tolerance) for rows in calls]
                if texts and all(found is not None for found in texts):
                    text = f"{peer.place}: {texts[min(call[1], len(texts) - 1)]}"
            if text is not None:
                name = reference.names[call[0]] or "(root)"
                return f"first in the result of module '{name}' on {text}"
        return None


def _differing_rows(
    real: Sequence[Tensor | None], expected: Sequence[Tensor | None], tolerance: float
) -> str | None:
    if len(real) != len(expected):
        return f"{len(real)} values instead of {len(expected)}"
    for own, other in zip(real, expected, strict=True):
        if own is not None and other is not None:
            text = _differ(own, other, tolerance, 0.0)
            if text is not None:
                return text
    return None


def _norm(sketch: Tensor | None) -> float:
    return 0.0 if sketch is None else float(sketch.norm().nan_to_num(0.0))


def _filled(sketch: Tensor | None) -> Tensor:
    return torch.zeros(1, dtype=torch.float64) if sketch is None else sketch


def _share(real: Tensor, expected: Tensor, floor: float) -> float:
    distance = float((real - expected).norm())
    if distance != distance:  # NaN
        return float("inf")
    size = max(float(real.norm()), float(expected.norm()), floor)
    return distance / size if size > 0 else 0.0


def _differ(
    real: Tensor | None, expected: Tensor | None, tolerance: float, floor: float
) -> str | None:
    """Describes how two sketches differ; None: by no more than rounding explains."""
    if real is None or expected is None:
        return None
    both_odd = ~real.isfinite() & ~expected.isfinite()
    real, expected = real.masked_fill(both_odd, 0.0), expected.masked_fill(both_odd, 0.0)
    share = _share(real, expected, floor)
    if share <= tolerance:
        return None
    return _in_words(real, expected, share)


def _in_words(real: Tensor, expected: Tensor, share: float) -> str:
    return (
        f"norm {float(real.norm()):.6g} instead of {float(expected.norm()):.6g}, the norm of the "
        f"difference is {share:.2g} of it"
    )


def _words(kind: tuple[Any, ...]) -> str:
    if kind[0] == "tensor":
        return f"a tensor of shape {kind[1]} and {kind[2]}"
    return str(kind[1]) if kind[0] == "value" else "another object"
