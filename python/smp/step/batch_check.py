"""Compares, once, the loss of a batch with the weighted mean over its pieces.

See docs/design/batch_check.md.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.model.engine import Engine
from smp.modules.tracing import running_again
from smp.observe.batch_check import verdict as judging
from smp.observe.batch_check.passes import ENDED, BatchPass
from smp.observe.batch_check.verdict import Found
from smp.observe.first_step import FirstStepDifference
from smp.observe.first_step.records import is_compiled
from smp.partition.containers import Containers, reachable_from_hook
from smp.partition.trace_guard import untouched
from smp.step import microbatch
from smp.step.batches import Batch, Bodies
from smp.step.run import StepRun
from smp.world import comm, runtime

_log = logging.getLogger("smp")

_FEW_SAMPLES = 8  # from these on a quarter of the batch has two

MakeBodies = Callable[[Mapping[str, list[Any]], int], Bodies]


class BatchCheck:
    """Check of one step function on one rank, behind its first step that trains.

    Args:
        current: the runtime.
        engines: partitioned models.
        name: of the step function.
        function: the user's function.
        axes: batch dimension by name, 0 where absent.
        batch: arguments of the step.
        make: makes the bodies of a pass, from pieces by name of the argument.
    """

    def __init__(
        self,
        current: runtime.Runtime,
        engines: Sequence[Engine],
        name: str,
        function: Callable[..., Any],
        axes: Mapping[str, int],
        batch: Batch,
        make: MakeBodies,
    ) -> None:
        self._current, self._engines, self._name = current, list(engines), name
        self._function, self._axes, self._batch, self._make = function, axes, batch, make
        ranks = current.rank.ranks
        self._is_driver = ranks["pp"] == 0
        self._reads = (ranks["rdp"], ranks["tp"])
        uneven = any(engine.uneven is not None for engine in engines)
        self._group = comm.MP_GROUP if uneven else comm.WORLD

    def run(self) -> None:
        """Does what has to be done, in the first call only. Collective over all ranks, within
        `DistributedModel.join` over those of a replica.

        Raises:
            FirstStepDifference: on all of them, if `SMP_CHECK_FIRST_STEP` is 1.
        """
        steps = self._current.steps
        key = (getattr(self._function, "__code__", self._function), *(e.idx for e in self._engines))
        if key in steps.batch_checks or not self._is_cut():
            return
        steps.batch_checks[key] = "runs"
        outcome = self._outcome()
        steps.batch_checks[key] = outcome
        self._tell(outcome)

    def _is_cut(self) -> bool:
        rank = self._current.rank
        own = rank.config.prescaled_batch and rank.sizes["tp"] > 1
        return rank.config.microbatches > 1 or rank.sizes["rdp" if own else "dp"] > 1

    def _tell(self, outcome: str) -> None:
        is_strict = self._current.rank.settings.check_first_step == "1"
        if outcome.startswith("differs: "):
            text = outcome.removeprefix("differs: ")
            if is_strict:
                raise FirstStepDifference(f"{_C.rank_prefix()}{text}")
            text += ". SMP_CHECK_FIRST_STEP=1 makes this an error, 0 leaves the check out"
            level = logging.WARNING
        else:
            text = f"check of the loss of step '{self._name}': {outcome}"
            is_told = is_strict and outcome.startswith("cannot tell")
            level = logging.WARNING if is_told else logging.DEBUG
        if self._current.rank.global_rank == 0 or self._group is comm.MP_GROUP and self._is_driver:
            _log.log(level, "smp: %s", text)

    # ---- what is looked at

    def _outcome(self) -> str:
        reason = self._reason_against()
        own = None if reason else self._choice()
        if isinstance(own, str):
            reason, own = own, None
        told: list[Any] = comm.allgather((self._reads, self._is_driver, reason, own), self._group)
        reason = next((reason for *_, reason, _ in told if reason is not None), None)
        if reason is not None:
            return reason
        drivers = {reads: choice for reads, is_driver, _, choice in told if is_driver}
        first = next(choice for (rdp, _), choice in drivers.items() if rdp == self._reads[0])
        # All ranks of a replica take the same part.
        count, part = first[0], first[1]
        pieces = self._pieces(count, part)
        sizes = [sum(drivers[self._reads][2][2 * part : 2 * part + 2])]
        sizes.append(drivers[self._reads][2][2 * part])
        return self._compare(pieces, sizes[0], sizes[1])

    def _reason_against(self) -> str | None:
        current = self._current
        if current.rank.settings.check_first_step == "0":
            return "off: SMP_CHECK_FIRST_STEP is 0"
        if current.verification is not None:
            return "off: the run is recorded"
        if not self._engines:
            return "off: there is no model"
        if any(is_compiled(module) for module in self._modules()):
            return "cannot tell: parts of the model are compiled, and would be compiled again"
        return None

    def _modules(self) -> list[nn.Module]:
        known: dict[nn.Module, None] = {}
        for engine in self._engines:
            known |= dict.fromkeys(engine.root.modules())
        return list(known)

    def _choice(self) -> tuple[int, int, list[int]] | str | None:
        """Into how many parts the batch is cut, which two of them are looked at, their sizes."""
        if not self._is_driver:
            return None  # arguments may be dummies
        arguments, axes = self._batch.arguments, self._axes
        sizes = microbatch.batch_sizes(arguments, axes)
        num_samples = min((size for _, size in sizes), default=0)
        if num_samples < 2:
            return "cannot tell: a rank has one sample, or no argument with samples"
        wanted = 4 if num_samples >= _FEW_SAMPLES else 2
        if self._batch.count > 2:
            wanted = self._batch.count + self._batch.count % 2
        count = min(wanted, num_samples - num_samples % 2)
        is_even = all(size % count == 0 for _, size in sizes)
        if not is_even and len({size for _, size in sizes}) > 1:
            return "cannot tell: arguments have several batch sizes"
        if not is_even and any(hasattr(v, "smp_slice") for v in arguments.values()):
            return "cannot tell: an argument that cuts itself has no halves of equal parts"
        half, rest = divmod(num_samples, count // 2)
        halves = [half + (part < rest) for part in range(count // 2)]
        own = [size for half in halves for size in (half - half // 2, half // 2)]
        return count, self._part_of_contrast(count), own

    def _part_of_contrast(self, count: int) -> int:
        """The two neighbours that have the most different numbers of masked positions."""
        contrast = [0.0] * (count // 2)
        for name, value in self._batch.arguments.items():
            for tensor in microbatch.tensors_to_split(value):
                if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
                    continue
                axis = self._axes.get(name, 0)
                halves = torch.tensor_split(tensor <= 0, count // 2, dim=axis)
                for part, half in enumerate(halves):
                    a, b = (p.double().mean() for p in torch.tensor_split(half, 2, dim=axis))
                    contrast[part] += abs(float(a - b)) if a == a and b == b else 0.0
        return max(range(count // 2), key=contrast.__getitem__)

    def _pieces(self, count: int, part: int) -> dict[str, tuple[Any, list[Any]]]:
        """By name of the argument two parts of the batch together, and each of them."""
        pieces = {}
        for name, value in self._batch.arguments.items():
            axis = self._axes.get(name, 0)
            both = microbatch.split(value, count // 2, axis)[part]
            if hasattr(value, "smp_slice"):
                pieces[name] = both, microbatch.split(value, count, axis)[2 * part : 2 * part + 2]
            else:
                pieces[name] = both, microbatch.split(both, 2, axis)
        return pieces

    # ---- passes

    def _compare(
        self, pieces: Mapping[str, tuple[Any, list[Any]]], num_samples: int, first: int
    ) -> str:
        whole = {name: [both] for name, (both, _) in pieces.items()}
        parts = {name: two for name, (_, two) in pieces.items()}
        sizes = [first, num_samples - first]
        found: list[Found] = []
        for shakes in (True, False):
            one, written = self._pass(whole, [num_samples], shakes)
            two, _ = self._pass(parts, sizes, shakes)
            own = self._found(one, two, sizes, written)
            found = comm.allgather(own, self._group)
            if not judging.reason_to_run_again(found):
                break
        reason = judging.why_unknown(found)
        if reason is None and any(map(judging.difference_of, found)):
            moved, _ = self._pass(parts, sizes, shakes, rounds=True)
            own.rounded, own.failure = list(moved.losses.values()), moved.failure
            found = comm.allgather(own, self._group)
            reason = judging.why_unknown(found)
        if reason is not None:
            return f"cannot tell: {reason}"
        known = [(one, d) for one in found if (d := judging.difference_of(one)) is not None]
        if not known:
            return "equal"
        worst, difference = max(known, key=lambda pair: pair[1].share)
        return "differs: " + judging.in_words(self._name, found, worst, difference)

    def _pass(
        self,
        pieces: Mapping[str, list[Any]],
        sizes: Sequence[int],
        shakes: bool,
        rounds: bool = False,
    ) -> tuple[BatchPass, list[str]]:
        """Runs the step function without gradients. Collective as an evaluation step is.

        Returns:
            what was noted, and names of buffers that forwards wrote here.
        """
        current, steps = self._current, self._current.steps
        run = BatchPass(sizes, current.rank.device, shakes=shakes, rounds=rounds)
        bodies = self._make(pieces, len(sizes))
        step_run = StepRun(current, self._engines, self._name, trains=False)
        num_begun = steps.num_begun
        with self._aside(run) as written:
            try:
                step_run.begin(len(sizes), None)
                step_run.run(len(sizes), lambda mb: self._run_body(run, bodies, mb))
                step_run.end()
            except BaseException:
                step_run.abandon()
                raise
            finally:
                steps.num_begun = num_begun
        return run, written

    def _run_body(self, run: BatchPass, bodies: Bodies, mb: int) -> None:
        places = [e.pipeline for e in self._engines if e.pipeline is not None]
        with run.noting_failure(), run.running(mb):
            bodies(mb)
        if places and self._is_driver:
            places[0].modules.publish_output((ENDED, None, 1.0, (0, [])))
        elif places:
            while not run.has_ended(mb):
                with run.noting_failure():
                    run.follow(places[0].modules.await_output()[0])

    @contextlib.contextmanager
    def _aside(self, run: BatchPass) -> Iterator[list[str]]:
        """The block leaves models, generators and what the step function collects as they were."""
        modules, written = self._modules(), []
        collected = Containers(objects=True)
        collected.add(reachable_from_hook(self._function))
        numpy = _numpy_random()
        states = random.getstate(), None if numpy is None else numpy.get_state()
        buffers = {
            name: (buffer, buffer.detach().clone())
            for engine in self._engines
            for name, buffer in engine.root.named_buffers()
            if buffer.is_floating_point() and not buffer.is_meta
        }
        hub = self._current.pipeline
        with contextlib.ExitStack() as stack:
            stack.enter_context(untouched(modules, keep_values=True))
            stack.enter_context(running_again())
            stack.enter_context(run.replacing_backward())
            stack.enter_context(torch.no_grad())
            random.seed(0)
            if numpy is not None:
                numpy.seed(0)
            for engine in self._engines:
                engine.batch_pass = run
            if hub is not None:
                hub.guard_calls(run)
            try:
                yield written
                written += self._written(buffers)
            finally:
                if hub is not None:
                    hub.guard_calls(None)
                for engine in self._engines:
                    engine.batch_pass = None
                random.setstate(states[0])
                if numpy is not None:
                    numpy.set_state(states[1])
                collected.restore()

    def _written(self, before: Mapping[str, tuple[Tensor, Tensor]]) -> list[str]:
        now = {name: b for e in self._engines for name, b in e.root.named_buffers()}
        return [
            name
            for name, (_, value) in before.items()
            if name in now and not _is_same(now[name], value)
        ]

    # ---- what was found

    def _found(
        self, one: BatchPass, two: BatchPass, sizes: Sequence[int], written: Sequence[str]
    ) -> Found:
        ranks = self._current.rank.ranks
        failure = one.failure or two.failure
        weights = self._weights(sizes)
        own = Found(
            place=f"global_rank {self._current.rank.global_rank} (pp {ranks['pp']} tp "
            f"{ranks['tp']} rdp {ranks['rdp']})",
            failure=failure,
            is_driver=self._is_driver,
            num_samples=sum(sizes),
            weights=weights,
            whole=one.losses[0],
            pieces=list(two.losses.values()),
            eps=max(one.eps, two.eps),
            draws=all(
                two.drawn.shapes[shape] == 2 * number for shape, number in one.drawn.shapes.items()
            )
            and two.drawn.shapes.keys() == one.drawn.shapes.keys(),
            is_shaken_alike=two.shaken == one.shaken + one.shaken,
            averages=all(engine.gradients.averages for engine in self._engines),
        )
        if written:
            own.reasons.append(judging.reason_of_buffers(written))
        if one.drawn.permutes:
            own.reasons.append(judging.REASON_OF_PERMUTATION)
        if self._is_driver:
            own.reasons += self._reasons_in_arguments()
        return own

    def _weights(self, sizes: Sequence[int]) -> list[float]:
        total = sum(sizes)
        return [size * len(sizes) / total for size in sizes]

    def _reasons_in_arguments(self) -> list[str]:
        labels, shapes = [], {}
        for name, value in self._batch.arguments.items():
            tensors = list(microbatch.tensors_to_split(value))
            ints = [t for t in tensors if not t.is_floating_point() and not t.is_complex()]
            if any(bool((t < 0).any()) for t in ints):
                labels.append(name)
            if any(t.dim() > 1 for t in tensors) and name not in self._axes:
                shapes[name] = max(tensors, key=Tensor.dim).shape
        reasons = [judging.reason_of_labels(labels)] if labels else []
        for engine in self._engines:
            for name, module in engine.root.named_modules():
                if getattr(module, "batch_first", True) is False and shapes:
                    return [*reasons, judging.reason_of_dims(name, shapes)]
        return reasons


def _is_same(now: Tensor, before: Tensor) -> bool:
    return now.shape == before.shape and torch.equal(now.nan_to_num(), before.nan_to_num())


def _numpy_random() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy.random
