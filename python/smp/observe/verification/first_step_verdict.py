"""Judges what the ranks saw of the first microbatch by what one process computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from smp.observe.verification.comparison import (
    Difference,
    Rule,
    Stage,
    describe,
    differences,
    first_module,
    first_of,
)
from smp.observe.verification.recorder import Rows

# Both sides do the same operations, so they differ in rounding at most.
_LIMITS = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4}
_HALF_LIMIT = 3e-2
# A pipeline rounds in other places than one process with other last digits in its parameters.
_MARGIN = 10.0
_OWN_BACKWARD = (
    "the outputs are equal, but gradients were not compared: the step calls loss.backward() in "
    "place of model.backward(loss)"
)


@dataclass
class OneProcess:
    """Results of one process.

    Attributes:
        stage: outputs of all calls, and gradients of parameters.
        rows: results of all modules.
        limit: largest share that is rounding.
        is_certain: whether the gradients that flow into the model are known one by one. If not,
            one output is, or is computed from, another one, and views and copies may separate them
            on one side only. Equal gradients are a result even then.
        has_backward: whether it ran a backward; not after `loss.backward()` of the script, whose
            gradients into the model are not known.
    """

    stage: Stage
    rows: Rows = field(default_factory=dict)
    limit: float = 1e-4
    is_certain: bool = True
    has_backward: bool = True


@dataclass
class Seen:
    """Observations of one rank.

    Attributes:
        place: the rank in words.
        tp_rank: tensor-parallel rank.
        reason: reason why the check has no result; None: it has one.
        gradients: gradients of its parameters by name; None: no gradient came.
        rows: results of the modules that it ran.
        outputs: outputs that the pipeline returned, on a driver.
        one: results of one process, on a driver.
    """

    place: str
    tp_rank: int
    reason: str | None = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    rows: Rows = field(default_factory=dict)
    outputs: Stage = field(default_factory=Stage)
    one: OneProcess | None = None


@dataclass(frozen=True)
class Verdict:
    """The result of the comparison.

    Attributes:
        reason: reason why there is no answer; None: there is one.
        difference: difference in words; None: all is equal.
    """

    reason: str | None = None
    difference: str | None = None


def limit_of(dtypes: Iterable[torch.dtype]) -> float:
    """Returns the limit of the coarsest of the dtypes that a model computes with."""
    return max((_LIMITS.get(d, _HALF_LIMIT) for d in dtypes if d.is_floating_point), default=1e-4)


def judge(seen: Sequence[Seen], moved: Sequence[OneProcess | None] = ()) -> Verdict:
    """Compares all ranks with one process; gives the same answer for the same arguments.

    Args:
        seen: observations of all ranks.
        moved: results of one process on each rank with parameters moved by some units in the last
            place; a pipeline that differs by no more than these is equal.
    """
    for own in seen:
        if own.reason is not None:
            return Verdict(reason=own.reason)
    for idx, driver in enumerate(seen):
        if driver.one is None:
            continue
        peers = [own for own in seen if own.tp_rank == driver.tp_rank]
        verdict = _judge(driver, driver.one, peers, moved[idx] if moved else None)
        if verdict != Verdict():
            return verdict
    return Verdict()


def mean_of(peers: Sequence[Seen]) -> Seen:
    """Returns what the first of some ranks saw, with the mean of the gradients of all.

    Args:
        peers: observations of ranks that compute parts of the same samples.
    """
    first = replace(peers[0], reason=next((own.reason for own in peers if own.reason), None))
    for name, value in first.gradients.items():
        every = [own.gradients.get(name) for own in peers]
        came = [value for value in every if value is not None]
        first.gradients[name] = torch.stack(came).sum(0) / len(peers) if came else None
    return first


def agrees(first: OneProcess, second: OneProcess) -> bool:
    """Returns whether one process computes the same twice."""
    found = differences(second.stage, first.stage, Rule(first.limit))
    return first.stage.items.keys() == second.stage.items.keys() and not any(found)


def _judge(
    driver: Seen, one: OneProcess, peers: Sequence[Seen], moved: OneProcess | None
) -> Verdict:
    real = Stage(items=dict(driver.outputs.items), facts=driver.outputs.facts)
    places: dict[str, str] = {}
    for own in peers:  # a parameter that was frozen by mistake is on no rank
        for name, value in own.gradients.items():
            places.setdefault(name, own.place)
            if value is not None and one.has_backward:
                real.items.setdefault(("gradient", name), value)
    for key, expected in one.stage.items.items():
        is_missing = key[0] == "output" and key not in real.items
        if is_missing and (made := _made(expected, one, peers)) is not None:
            real.items[key] = made
    third = None if moved is None else moved.stage
    found = list(differences(real, one.stage, Rule(one.limit, _MARGIN), third))
    found.sort(key=Difference.order)
    if not found:
        came = any(g is not None for own in peers for g in own.gradients.values())
        unknown = came and not one.has_backward
        return Verdict(_OWN_BACKWARD if unknown else None)
    if not all(bool(value.isfinite().all()) for value in one.stage.items.values()):
        return Verdict(reason="what one process computes is not finite")
    first, count = first_of(found, one.rows)
    if first.kind == "gradient" and not one.is_certain:
        text = "the loss is made of several outputs, one of which is made of another"
        return Verdict(reason=text)
    module = first_module([(own.place, own.rows) for own in peers], one.rows, one.limit)
    if first.name in places:
        first = replace(first, text=f"{first.text} on {places[first.name]}")
    return Verdict(difference=describe(first, count, module))


def _made(expected: Tensor, one: OneProcess, peers: Sequence[Seen]) -> Tensor | None:
    """Returns what a rank recorded of the module that made an output in one process, or None.

    Calls of a module that is called several times cannot be told apart if several ranks make them.
    """
    num_calls = Counter(name for _, name, _ in one.rows)
    for call, rows in one.rows.items():
        for position, row in enumerate(rows):
            if row is None or num_calls[call[1]] > 1 or not torch.equal(row.numbers, expected):
                continue
            for own in peers:
                made = own.rows.get(call, [])
                if position < len(made) and (other := made[position]) is not None:
                    return other.numbers
    return None
