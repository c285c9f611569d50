"""Compares the loss of a batch with the weighted mean over its pieces, in a few first steps.

See docs/design/batch_check.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.data_parallel.batch_weights import num_batches
from smp.dropout.others import others_kept
from smp.modules.tracing import running_again
from smp.observe.batch_check import verdict as judging
from smp.observe.batch_check.passes import ENDED, BatchPass
from smp.observe.batch_check.verdict import Found, Left
from smp.observe.verification.first_step import FirstStepDifference
from smp.observe.verification.memory_needed import reason_not_to_fit_again
from smp.observe.verification.recorder import is_compiled
from smp.partition.containers import Containers, reachable_from_hook
from smp.partition.trace_guard import untouched
from smp.partition.trace_state import KeptValues
from smp.step.batches import Batch, TrainedStep
from smp.step.run import StepRun
from smp.world import comm, runtime
from smp.world.observers import StepObserver

_log = logging.getLogger("smp")

_MOST_PIECES = 4  # of the part that is checked
_STEPS = (1, 4, 16, 64)  # that are checked


@dataclasses.dataclass(frozen=True)
class _Choice:
    """A choice of the part of a batch that is looked at.

    Attributes:
        count: number of parts of the batch.
        part: number of the chosen one.
        sizes: number of samples of each.
    """

    count: int
    part: int
    sizes: list[int]


@dataclasses.dataclass(frozen=True)
class _Look:
    """A comparison of a part of the batch as one microbatch with the same part in pieces.

    Attributes:
        whole: part of the batch.
        num_samples: number of its samples.
        number: number of pieces.
        shakes: whether outputs of models are moved.
        slopes: whether they get tangents as well.
        alike: whether one number is used for all that an operator draws.
    """

    whole: Batch
    num_samples: int
    number: int
    shakes: bool = True
    slopes: bool = False
    alike: bool = False

    def pieces(self) -> Batch:
        """Returns the part, cut into pieces."""
        return dataclasses.replace(self.whole, count=self.number)

    def sizes(self) -> list[int]:
        """Returns the number of samples of each piece."""
        return _sizes(self.num_samples, self.number)


class BatchCheckObserver(StepObserver):
    """Runs a `BatchCheck` behind training steps 1, 4, 16 and 64 of each step function.

    The first batch may have no padding yet, and averages of weights begin as these weights.

    Attributes:
        outcomes: result of the last check in words, by step function and models.
    """

    def __init__(self, current: runtime.Runtime) -> None:
        self._current = current
        self.outcomes: dict[Any, str] = {}
        self._num_steps: Counter[Any] = Counter()

    def step_trained(self, step: TrainedStep) -> bool:
        """Checks some steps. Collective over all ranks, inside of `join` over a replica.

        A timeline shows the steps of the script alone, so later steps are checked then.

        Returns:
            whether a later step is to be looked at.

        Raises:
            FirstStepDifference: on all these ranks, if `SMP_CHECK_FIRST_STEP` is 1.
        """
        rank = self._current.rank
        code = getattr(step.function, "__code__", step.function)
        # Inside of `join` some replicas may have no step, so another one is checked outside of it.
        is_uneven = any(engine.uneven is not None for engine in step.engines)
        key = (code, is_uneven, *(engine.idx for engine in step.engines))
        is_cut = rank.config.microbatches > 1 or num_batches(rank) > 1
        before = self.outcomes.get(key)
        if not is_cut or self._is_over(before, self._num_steps[key]):
            return False
        if self._current.timeline.is_on:
            return True
        self._num_steps[key] += 1
        number = self._num_steps[key]
        if number in _STEPS:
            self.outcomes[key] = "runs"
            check = BatchCheck(self._current, step, comm.MP_GROUP if is_uneven else comm.WORLD)
            self.outcomes[key] = check.run(before)
        return not self._is_over(self.outcomes[key], number)

    def _is_over(self, outcome: str | None, num_steps: int) -> bool:
        """Returns whether no later step is checked.

        Going on without a lost rank repeats a step, but not what is run behind it.
        """
        goes_on = self._current.rank.config.on_failure != "end"
        last_step = _STEPS[0] if goes_on else _STEPS[-1]
        return num_steps >= last_step or (outcome or "").startswith(("differs: ", "off: "))


class BatchCheck:
    """The check of one step function on one rank, behind its first step that trains.

    Args:
        current: the runtime.
        step: the step that has trained.
        group: ranks that take part.
    """

    def __init__(self, current: runtime.Runtime, step: TrainedStep, group: comm.CommGroup) -> None:
        self._current, self._engines, self._name = current, list(step.engines), step.name
        self._function, self._batch = step.function, step.batch
        self._rule, self._make = step.rule, step.make
        ranks = current.rank.ranks
        self._is_driver = ranks["pp"] == 0
        self._reads = (ranks["rdp"], ranks["tp"])
        self._group = group

    def run(self, before: str | None = None) -> str:
        """Returns the outcome in words, and logs it. Collective over the group.

        Args:
            before: outcome of the check before this one, which is not logged twice.

        Raises:
            FirstStepDifference: on all of them, if `SMP_CHECK_FIRST_STEP` is 1.
        """
        outcome = self._outcome()
        if outcome != before:
            self._tell(outcome)
        return outcome

    def _tell(self, outcome: str) -> None:
        is_strict = self._current.rank.settings.check_first_step == "1"
        if outcome.startswith("differs: "):
            text = outcome.removeprefix("differs: ")
            if is_strict:
                raise FirstStepDifference(f"{_C.rank_prefix()}{text}")
            text += ". SMP_CHECK_FIRST_STEP=1 makes this an error, 0 leaves the check out"
            level = logging.WARNING
        elif outcome.startswith("cannot tell: "):
            text = (
                f"could not check that the loss of step '{self._name}' is a mean over samples: "
                f"{outcome.removeprefix('cannot tell: ')}. If it divides by something that pieces "
                "of a batch have in other numbers, say so: @smp.step(weight=...), docs/losses.md"
            )
            is_odd = is_strict or judging.RUN_FAILED in outcome
            level = logging.WARNING if is_odd else logging.INFO
        else:
            text = f"check of the loss of step '{self._name}': {outcome}"
            level = logging.DEBUG
        if self._current.rank.global_rank == 0 or self._group is comm.MP_GROUP and self._is_driver:
            _log.log(level, "smp: %s", text)

    # ---- parts

    def _outcome(self) -> str:
        reason = self._reason_against()
        own = None if reason else self._choice()
        if isinstance(own, str):
            reason, own = own, None
        told: list[Any] = comm.allgather((self._reads, self._is_driver, reason, own), self._group)
        reasons: list[str] = [reason for *_, reason, _ in told if reason is not None]
        if reasons:
            return reasons[0]
        drivers: dict[tuple[int, int], _Choice] = {
            reads: choice for reads, is_driver, _, choice in told if is_driver
        }
        counts = {(rdp, choice.count) for (rdp, _), choice in drivers.items()}
        if len(counts) > len({rdp for rdp, _ in counts}):
            return "cannot tell: tensor-parallel ranks have batches of several sizes"
        return self._compare(self._looks(drivers))

    def _looks(self, drivers: Mapping[tuple[int, int], _Choice]) -> list[_Look]:
        """Returns comparisons; each but the first is for code that does not bear those before."""
        # All ranks of a replica take the same part.
        first = next(own for (rdp, _), own in drivers.items() if rdp == self._reads[0])
        whole = self._part(first.count, first.part)
        num_samples = drivers[self._reads].sizes[first.part]
        smallest = min(min(choice.sizes) for choice in drivers.values())
        numbers = (_MOST_PIECES, 2) if smallest >= _MOST_PIECES else (2,)
        looks = [
            _Look(whole, num_samples, number, slopes=slopes)
            for number in numbers
            for slopes in (True, False)
        ]
        return [*looks, _Look(whole, num_samples, 2, shakes=False)]

    def _reason_against(self) -> str | None:
        current = self._current
        if current.rank.settings.check_first_step == "0":
            return "off: SMP_CHECK_FIRST_STEP is 0"
        if current.verification is not None:
            return "off: the run is recorded"
        if not self._engines:
            return "off: there is no model"
        compiled = any(engine.compiled.is_on for engine in self._engines)
        if compiled or any(map(is_compiled, self._modules())):
            return "cannot tell: parts of the model are compiled, and would be compiled again"
        if current.rank.settings.check_first_step == "auto":
            reason = reason_not_to_fit_again(current.rank.device, current.rank.local_size)
            return None if reason is None else f"cannot tell: {reason}"
        return None

    def _modules(self) -> list[nn.Module]:
        known: dict[nn.Module, None] = {}
        for engine in self._engines:
            known |= dict.fromkeys(engine.root.modules())
        return list(known)

    def _choice(self) -> _Choice | str | None:
        if not self._is_driver:
            return None  # the arguments may be dummies
        num_samples = self._batch.num_samples
        if num_samples < 2:
            return "cannot tell: a rank has one sample, or no argument with samples"
        # A part is two microbatches, or a quarter of the batch, if it has a sample for each piece.
        count = min(max(self._batch.count // 2, _MOST_PIECES), num_samples // _MOST_PIECES)
        count = max(count, 1)
        return _Choice(count, self._part_of_contrast(count), _sizes(num_samples, count))

    def _part_of_contrast(self, count: int) -> int:
        """Returns the part whose pieces have the most different numbers of masked positions."""
        contrast = [0.0] * count
        for _, tensor, axis in self._batch.cutting.along():
            if not tensor.numel():
                continue
            is_mask = not tensor.is_floating_point() and not tensor.is_complex()
            masked = tensor <= 0 if is_mask else tensor == 0
            for part, own in enumerate(torch.tensor_split(masked, count, dim=axis)):
                pieces = torch.tensor_split(own, min(_MOST_PIECES, own.shape[axis]), dim=axis)
                shares = [float(piece.double().mean()) for piece in pieces if piece.numel()]
                contrast[part] += max(shares, default=0.0) - min(shares, default=0.0)
        return max(range(count), key=contrast.__getitem__)

    def _part(self, count: int, part: int) -> Batch:
        """Returns one of the parts of the batch, as a batch that makes one microbatch."""
        batch = self._batch
        return dataclasses.replace(
            batch,
            bound=batch.pieces(count).of(part),
            cutting=batch.cutting.part(count, part),
            count=1,
        )

    # ---- passes

    def _compare(self, looks: Sequence[_Look]) -> str:
        """Compares the loss of a part with those of its pieces, and returns the outcome."""
        for look in looks:
            own, found = self._look(look)
            if judging.draws_differ(found):
                look = dataclasses.replace(look, alike=True)
                own, found = self._look(look)
            if not judging.reason_to_run_again(found):
                break
        reason = judging.why_unknown(found)
        if reason is None and any(map(judging.difference_of, found)):
            moved, _ = self._pass(look, look.sizes(), rounds=True)
            own.rounded, own.failure = list(moved.losses.values()), moved.failure
            found = comm.allgather(own, self._group)
            reason = judging.why_unknown(found)
        if reason is not None:
            return f"cannot tell: {reason}"
        known = [(one, d) for one in found if (d := judging.difference_of(one)) is not None]
        if not known:
            unseen = judging.unseen_in_words(self._name, found)
            return f"differs: {unseen}" if unseen else "equal"
        worst, difference = max(known, key=lambda pair: pair[1].share)
        return "differs: " + judging.in_words(self._name, found, worst, difference)

    def _look(self, look: _Look) -> tuple[Found, list[Found]]:
        """Runs the part and its pieces; returns what was found here, and on each rank."""
        whole, left = self._pass(look, [look.num_samples])
        pieces, left_by_pieces = self._pass(look, look.sizes())
        own = self._found(whole, pieces, look, sorted(left))
        own.unseen = self._unseen(judging.unlike(left, left_by_pieces))
        if self._is_driver:
            self._weigh(own, look.whole, look.pieces())
            own.reasons += self._reasons_in_arguments(is_weighed=len(set(own.weights)) > 1)
        return own, comm.allgather(own, self._group)

    def _pass(
        self, look: _Look, sizes: Sequence[int], rounds: bool = False
    ) -> tuple[BatchPass, dict[str, Left]]:
        """Runs the step function without gradients. Collective like an evaluation step.

        Returns:
            the notes of the pass, and what forwards wrote here, by name.
        """
        current, steps = self._current, self._current.steps
        run = BatchPass(
            sizes,
            current.rank.device,
            shakes=look.shakes,
            rounds=rounds,
            alike=look.alike,
            slopes=look.slopes,
        )
        bodies = self._make(dataclasses.replace(look.whole, count=len(sizes)))
        step_run = StepRun(current, self._engines, self._name, trains=False)
        num_begun = steps.num_begun
        with run.keeping_tangents(), self._aside(run) as left:
            try:
                step_run.begin(len(sizes))
                step_run.run(len(sizes), lambda mb: self._run_body(run, bodies, mb))
                step_run.end()
            except BaseException:
                step_run.abandon()
                raise
            finally:
                steps.num_begun = num_begun
                steps.num_passes += 1
        return run, left

    def _run_body(self, run: BatchPass, bodies: Callable[[int], None], mb: int) -> None:
        places = [e.pipeline for e in self._engines if e.pipeline is not None]
        with run.noting_failure(), run.running(mb):
            bodies(mb)
        if places and self._is_driver:
            places[0].modules.publish_output((ENDED, None, 1.0, (0, [])))
        elif places:
            while not run.has_ended(mb):
                run.note_call(places[0].modules.await_output()[0])

    @contextlib.contextmanager
    def _aside(self, run: BatchPass) -> Iterator[dict[str, Left]]:
        """Restores models, generators and the containers of the step function after the block."""
        modules, left = self._modules(), dict[str, Left]()
        collected = Containers(objects=True)
        collected.add(reachable_from_hook(self._function))
        buffers = {
            name: (buffer, buffer.detach().clone())
            for engine in self._engines
            for name, buffer in engine.root.named_buffers()
            if buffer.is_floating_point() and not buffer.is_meta
        }
        hub = self._current.pipeline
        with contextlib.ExitStack() as stack:
            stack.enter_context(untouched(modules, keep_values=True))
            run.kept = KeptValues(modules)
            stack.callback(run.kept.restore)
            stack.enter_context(running_again())
            stack.enter_context(run.replacing_backward())
            stack.enter_context(torch.no_grad())
            stack.enter_context(others_kept())
            for engine in self._engines:
                engine.batch_pass = run
            if hub is not None:
                hub.guard_calls(run)
            try:
                yield left
                left |= self._left(buffers, run.kept)
            finally:
                if hub is not None:
                    hub.guard_calls(None)
                for engine in self._engines:
                    engine.batch_pass = None
                collected.restore()

    def _left(
        self, buffers: Mapping[str, tuple[Tensor, Tensor]], kept: KeptValues
    ) -> dict[str, Left]:
        """Returns what forwards have written to buffers and parameters: before, and now."""
        now = {name: b for e in self._engines for name, b in e.root.named_buffers()}
        left = {
            name: Left(value, now[name].detach().clone())
            for name, (_, value) in buffers.items()
            if name in now and not _is_same(now[name], value)
        }
        before = kept.values_before()
        for engine in self._engines:
            for name, parameter in engine.root.named_parameters():
                value = before.get(parameter)
                if value is None or not value.is_floating_point() or _is_same(parameter, value):
                    continue
                left[name] = Left(value, parameter.detach().clone())
        return left

    # ---- findings

    def _found(
        self, whole: BatchPass, pieces: BatchPass, look: _Look, written: Sequence[str]
    ) -> Found:
        rank, sizes = self._current.rank, look.sizes()
        failure = whole.failure or pieces.failure
        own = Found(
            place=f"global_rank {rank.global_rank} ({rank.place})",
            failure=failure,
            is_driver=self._is_driver,
            num_samples=sum(sizes),
            whole=whole.losses[0],
            pieces=list(pieces.losses.values()),
            slopes=look.slopes,
            eps=max(whole.eps, pieces.eps),
            draws=whole.drawn.permutes or pieces.drawn.is_like(whole.drawn, len(sizes)),
            is_shaken_alike=pieces.shaken == _times(whole.shaken, len(sizes)),
            averages=all(engine.gradients.averages for engine in self._engines),
        )
        if written:
            own.reasons.append(judging.reason_of_writes(written))
        if whole.drawn.permutes:
            own.reasons.append(judging.REASON_OF_PERMUTATION)
        return own

    def _unseen(self, unlike: Sequence[str]) -> list[str]:
        """Returns in words what depends on how the batch is cut and shows in no loss."""
        unseen, num_microbatches = [], self._current.rank.config.microbatches
        if unlike and num_microbatches > 1:
            unseen.append(judging.unlike_in_words(unlike, num_microbatches))
        counting = [
            name
            for engine in self._engines
            for name, module in engine.root.named_modules()
            if getattr(module, "scale_grad_by_freq", False)
        ]
        return [*unseen, judging.counting_in_words(counting)] if counting else unseen

    def _weigh(self, own: Found, one: Batch, several: Batch) -> None:
        """Weighs losses like the step."""
        with torch.no_grad():
            try:
                for batch, weights in ((one, own.whole_weights), (several, own.weights)):
                    weighed = self._rule.weigh(self._current, self._engines, [batch])
                    weights[:] = map(weighed.output_weight, range(batch.count))
            except Exception as error:
                own.failure = own.failure or f"its weight: {error}"

    def _reasons_in_arguments(self, *, is_weighed: bool) -> list[str]:
        labels, shapes = [], {}
        for path, tensor, axis in self._batch.cutting.along():
            is_integer = not tensor.is_floating_point() and not tensor.is_complex()
            if is_integer and not is_weighed and bool((tensor < 0).any()):
                labels.append(".".join(path))
            if tensor.dim() > 1 and axis == 0:
                shapes[".".join(path)] = tensor.shape
        reasons = [judging.reason_of_labels(labels)] if labels else []
        for engine in self._engines:
            for name, module in engine.root.named_modules():
                if getattr(module, "batch_first", True) is False and shapes:
                    return [*reasons, judging.reason_of_dims(name, shapes)]
        return reasons


def _sizes(num_samples: int, count: int) -> list[int]:
    base, more = divmod(num_samples, count)
    return [base + (part < more) for part in range(count)]


def _times(counts: Mapping[Any, int], number: int) -> dict[Any, int]:
    return {key: count * number for key, count in counts.items()}


def _is_same(now: Tensor, before: Tensor) -> bool:
    return now.shape == before.shape and torch.equal(now.nan_to_num(), before.nan_to_num())
