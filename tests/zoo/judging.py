"""Compares what the ranks saw with one process, and names the outcome."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from smp.tensor_parallel import partial
from tests.dist.pool import Outcome, Pool, RankFailure
from tests.reference.tolerances import FLOOR_FRACTION, distance, relative_difference
from tests.zoo.modes import STEPS
from tests.zoo.running import Job, Record, Tensors, train_alone, train_together

TIMEOUT_S = 60.0
_TIMES_ALONE = 20  # ranks share cores, and the first step records
# Models cast to float32 inside whatever their dtype is; only other orders of sums come on top.
LIMITS = {torch.float64: 5e-6, torch.float32: 2e-4}
# Limit without casts to float32, see `is_rounding`: for losses, gradients and parameters.
LIFTED_LIMIT = 1e-9
# How much more ranks and one process may differ than these casts make of one process.
FARTHER = 4
# How far parameters are moved to see whether a model amplifies rounding: some units in last place.
JITTERS = {torch.float64: 1e-15, torch.float32: 5e-7, torch.bfloat16: 4e-3}
# Limit of 16 bits, by norms, in the first step: later ones amplify another order of sums.
HALF_LIMIT = 0.1
# The last frame of an error that we raise on purpose: a line of ours with `raise`.
_RAISED_BY_US = re.compile(
    r"^\s*File \"[^\"]*/python/smp/[^\"]*\", line \d+, in \S+\n\s*raise ", re.M
)
_PREFIX = re.compile(r"\s*(\[global_rank \d|smp:)")
_DEADLOCK = re.compile(r"deadlock: every rank waits")
_FRAME = re.compile(r"^\s*File \"", re.M)

EQUAL, REFUSED, CRASH, DIFFERENT = "equal", "refused", "crash", "different"
NAN, HANG, SKIPPED = "nan", "hang", "skipped"


@dataclass
class Result:
    """The result of one model in one mode.

    Attributes:
        model, family, mode: names of what ran.
        outcome: equal, refused, crash, different, nan, hang; skipped where nothing gave a loss.
        reason: the error, or what differs and how much.
        bitwise: whether all numbers are the same, not only near.
        first_step_s: time of the first step with smp.
        step_s, alone_s: times of the last step with smp and in one process.
        remote_calls: between pipeline ranks; none means that one rank computed everything.
        num_planned: parts that a plan has split on the first rank.
        found: amounts of the differences, by what was compared.
    """

    model: str
    family: str
    mode: str
    outcome: str
    reason: str = ""
    bitwise: bool = False
    first_step_s: float = 0.0
    step_s: float = 0.0
    alone_s: float = 0.0
    remote_calls: int = 0
    num_planned: int = 0
    details: str = field(default="", repr=False)
    found: dict[str, float] = field(default_factory=dict, repr=False)


def run(pool: Pool, job: Job, alone: list[Record]) -> Result:
    """Runs a job in the pool and judges it."""
    entry = job.plan.entry
    result = Result(str(entry), entry.family, job.mode.name, EQUAL)
    start = time.perf_counter()
    try:
        outcomes = pool.outcomes(
            job.mode.world_size, train_together, job, timeout=patience_s(alone)
        )
    except RankFailure as failure:
        result.outcome, result.reason = HANG, first_line(str(failure))
        result.details = str(failure)
        return result
    finally:
        result.first_step_s = time.perf_counter() - start
    failed = sorted((o for o in outcomes if o.error), key=lambda o: o.time)
    if failed:
        return _failed(result, failed)
    judged = judge(result, [outcome.value for outcome in outcomes], alone, job)
    if judged.outcome == DIFFERENT and is_rounding(pool, judged, alone, job):
        judged.outcome, judged.reason, judged.details = EQUAL, "", ""
    if judged.outcome == DIFFERENT:
        skip_if_chaotic(judged, alone, job)
    judged.found = {}  # results are written to files
    return judged


def patience_s(alone: list[Record]) -> float:
    """Seconds after which ranks hang, of which some models are as slow in one process."""
    return TIMEOUT_S + _TIMES_ALONE * sum(alone[0].seconds)


def is_rounding(pool: Pool, result: Result, alone: list[Record], job: Job) -> bool:
    """Returns whether what differs is the rounding of casts to float32 inside of a float64 model.

    Such a difference is gone without these casts, to `LIFTED_LIMIT`, and with them it is not much
    more than what they make of the same loss, gradient or parameter in one process.
    """
    is_cast = job.plan.dtype == torch.float64 and job.plan.entry.source == "transformers"
    if not is_cast or job.mode.half:
        return False
    lifted = replace(job, lifted=True)
    try:
        exact = train_alone(lifted)
    except Exception:  # some models cannot do without a cast
        return False
    own = judge(_blank(result), alone, exact, job).found
    if any(
        value > FARTHER * own.get(what, 0.0)
        for what, value in result.found.items()
        if value > LIMITS[torch.float64]
    ):
        return False
    outcomes = pool.outcomes(job.mode.world_size, train_together, lifted, timeout=patience_s(alone))
    if any(outcome.error for outcome in outcomes):
        return False
    records = [outcome.value for outcome in outcomes]
    return judge(_blank(result), records, exact, lifted).outcome == EQUAL


def _blank(result: Result) -> Result:
    return Result(result.model, result.family, result.mode, EQUAL)


def skip_if_chaotic(result: Result, alone: list[Record], job: Job) -> None:
    """A model that differs from itself as early, when rounding moves it, can prove nothing."""
    moved = train_alone(job, JITTERS[torch.bfloat16 if job.mode.half else job.plan.dtype])
    other = judge(_blank(result), moved, alone, job)
    own_step, step = _first_step(other.details), _first_step(result.details)
    as_much = 10 * _most(other.details, own_step) >= _most(result.details, step)
    if own_step <= step and as_much:
        result.outcome = SKIPPED
        result.reason = f"one process amplifies rounding as much: {other.reason}"


def _first_step(details: str) -> int:
    """The first step in which something differs; behind all of them if nothing does."""
    steps = [int(step) for step in re.findall(r"of step (\d+)", details)]
    return min(steps, default=STEPS + (1 if details else 2))


def _most(details: str, step: int) -> float:
    """The largest difference in a step; what is missing differs without end."""
    lines = [line for line in details.splitlines() if f"of step {step}" in line]
    found = [re.search(r"differs by (\S+?):?(?: |$)", line) for line in lines]
    return max((float(one[1]) if one else float("inf") for one in found), default=0.0)


def _failed(result: Result, failed: list[Outcome]) -> Result:
    """Stores the error of a rank that failed by itself: other ranks only report that failure."""
    own = [o for o in failed if "PeerFailure" not in o.bases] or failed
    first = own[0]
    result.outcome = REFUSED if is_ours(first) else CRASH
    if _DEADLOCK.search(first.message):
        result.outcome = HANG
    result.reason = f"{first.error}: {first_line(first.message)}"
    result.details = first.traceback
    return result


def is_ours(outcome: Outcome) -> bool:
    """Returns whether smp raises an error itself, in the place where it was noticed."""
    frames = [match.start() for match in _FRAME.finditer(outcome.traceback)]
    last = outcome.traceback[frames[-1] :] if frames else ""
    return bool(_RAISED_BY_US.match(last)) or bool(_PREFIX.match(outcome.message))


def first_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[0] if lines else ""


def judge(result: Result, records: list[Record], alone: list[Record], job: Job) -> Result:
    """Losses, gradients, parameters; the first difference is the reason."""
    result.first_step_s = max(record.seconds[0] for record in records if record.seconds)
    result.step_s = max(record.seconds[-1] for record in records if record.seconds)
    result.alone_s = alone[0].seconds[-1]
    result.remote_calls = sum(record.remote_calls for record in records)
    result.num_planned = records[0].num_planned
    half = job.mode.half
    limit = LIFTED_LIMIT if job.lifted else HALF_LIMIT if half else LIMITS[job.plan.dtype]
    comparison = Comparison(limit, by_norm=half)
    assert any(record.losses for record in records)
    for record in (record for record in records if record.losses):
        comparison.losses(record, alone[record.replica])
    if job.mode.gradients:
        for step, expected in enumerate(alone[0].grads[: 1 if half else None]):
            parts = [record.grads[step] for record in records if record.replica == 0]
            comparison.tensors(f"gradient of step {step + 1}", _joined(parts), expected)
    if job.mode.split:
        _compare_parts(comparison, records, alone[0])
    elif records[0].params and not half:
        parts = [r.params for r in records if r.replica == 0 or not job.mode.gradients]
        comparison.tensors("parameter", _joined(parts), alone[0].params)
    result.bitwise = not comparison.differences
    result.found = comparison.found
    if job.mode.split and all(record.elements >= alone[0].elements for record in records):
        result.reason = "nothing was split"
    if "context_parallel_degree" in job.mode.config:
        num_blocks, num_cut = (
            sum(getattr(r, name) for r in records) for name in ("num_blocks", "num_cut")
        )
        whole = next((problem for r in records for problem in r.problems), "no block with tokens")
        if num_cut == 0:
            result.reason = f"nothing was split ({whole})"
        elif num_cut < num_blocks:
            result.reason = f"{num_cut / num_blocks:.0%} of the blocks compute parts ({whole})"
    if comparison.over:
        result.outcome = NAN if comparison.is_nan else DIFFERENT
        result.reason = comparison.over[0]
        result.details = "\n".join(comparison.over[:40])
    return result


def _compare_parts(comparison: Comparison, records: list[Record], alone: Record) -> None:
    """Gradients and parameters of a split model, if its names are those of the plain one."""
    params = _joined([record.params for record in records])
    if not alone.params.keys() <= params.keys():
        return  # a distributed form has taken the place of modules; only losses tell
    grads = records[0].grads[0] if records[0].grads else _merged(records)
    with_grad = {name: grads.get(name) for name in alone.params}
    comparison.tensors("gradient of step 1", with_grad, alone.grads[0])
    comparison.tensors("parameter", params, alone.params)


def _merged(records: list[Record]) -> Tensors:
    return partial.merge([record.parts for record in records])


def _joined(parts: list[Tensors]) -> Tensors:
    joined: Tensors = {}
    for part in parts:
        joined.update(part)
    return joined


class Comparison:
    """Collects what differs."""

    def __init__(self, limit: float, by_norm: bool = False) -> None:
        self.limit = limit
        self.measure = distance if by_norm else relative_difference
        self.differences: list[str] = []
        self.over: list[str] = []
        self.found: dict[str, float] = {}
        self.is_nan = False

    def losses(self, record: Record, alone: Record) -> None:
        for step, (got, expected) in enumerate(zip(record.losses, alone.losses, strict=True)):
            self._one(
                f"loss of step {step + 1} on pp_rank {record.pp_rank}",
                torch.tensor(got, dtype=torch.float64),
                torch.tensor(expected, dtype=torch.float64),
                0.0,
            )

    def tensors(self, what: str, got: Tensors, expected: Tensors) -> None:
        filled = [t for t in expected.values() if t is not None and t.numel()]
        floor = FLOOR_FRACTION * max((float(t.abs().max()) for t in filled), default=0.0)
        for name in sorted(set(expected) - set(got)):
            self._over(f"{what} {name}: on no rank")
        for name, reference in expected.items():
            value = got.get(name)
            if value is None or reference is None:
                if name in got and (value is None) != (reference is None):
                    self._none(f"{what} {name}", value, reference)
                continue
            self._one(f"{what} {name}", value, reference, floor)

    def _none(self, what: str, value: Any, reference: Any) -> None:
        some = value if reference is None else reference
        if not bool(some.count_nonzero()):  # a gradient of zeros says the same as none
            return
        here, there = ("none", "a value") if value is None else ("a value", "none")
        self._over(f"{what}: {here} instead of {there}")

    def _one(self, what: str, value: Tensor, reference: Tensor, floor: float) -> None:
        if value.shape == reference.shape and torch.equal(value, reference):
            return
        self.differences.append(what)
        if bool(torch.isnan(reference).any()):
            return
        difference = self.measure(value, reference, floor)
        self.found[what] = max(difference, self.found.get(what, 0.0))
        if difference > self.limit:
            self.is_nan |= bool(torch.isnan(value).any())
            shown = f": {value.tolist()} for {reference.tolist()}" if "loss" in what else ""
            self._over(f"{what} differs by {difference:.1e}{shown}")

    def _over(self, text: str) -> None:
        self.differences.append(text)
        self.over.append(text)


def is_bad(result: Result) -> bool:
    """Returns whether a result is a defect: a crash, a difference, NaN or a hang."""
    return result.outcome in (CRASH, DIFFERENT, NAN, HANG)


def modes_of(results: list[Result]) -> list[str]:
    return list(dict.fromkeys(result.mode for result in results))
