"""``@smp.step``: runs a function once per microbatch, pipelined over the ranks of a replica."""

from __future__ import annotations

import functools
import inspect
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast, overload

import torch
from torch import Tensor

from smp.data_parallel import BatchWeights
from smp.model.engine import Engine
from smp.step import going_on, microbatch, taking_over
from smp.step.batches import Batch, TrainedStep
from smp.step.bodies import Bodies, BodiesOfRanks, MicrobatchRunner
from smp.step.cutting import Cutting
from smp.step.first_use import partition_used
from smp.step.microbatch import StepOutput as StepOutput
from smp.step.readings import Reading, Rules
from smp.step.run import StepRun
from smp.step.unwrapped import run_without_model
from smp.step.weights import WeightRule
from smp.world import preemption, runtime
from smp.world.log import first_rank_log

# As a submodule, `smp.step` would hide the decorator of the same name; the public name wins
# because `smp/__init__.py` binds it last.


P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def _outside_compiled(function: F) -> F:
    """Returns a function that `torch.compile` does not follow."""
    outside: Any = torch._disable_dynamo(function)
    return cast(F, outside)


class StepFunction(Generic[P, R]):
    """A function that runs once per microbatch; it gives an ``R``.

    It is callable, but no descriptor: in a class body it stays a plain function and does not
    receive ``self``.
    """

    def __init__(
        self,
        function: Callable[P, Any],
        non_split_inputs: Iterable[str] | None,
        input_split_axes: Mapping[str, int] | None,
        detach_outputs: bool,
        weight: str | Callable[..., Any],
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._signature = inspect.signature(function)
        self._name = f"{function.__module__}.{function.__qualname__}"
        self._non_split = frozenset(non_split_inputs or ())
        self._axes = dict(input_split_axes or {})
        kinds = {p.kind: p.name for p in self._signature.parameters.values()}
        self._var_keyword = kinds.get(inspect.Parameter.VAR_KEYWORD)
        self._var_positional = kinds.get(inspect.Parameter.VAR_POSITIONAL)
        self._known: weakref.WeakKeyDictionary[runtime.Runtime, _Known]
        self._known = weakref.WeakKeyDictionary()  # ends with the runtime
        self._detach_outputs = detach_outputs
        self._rule = WeightRule(weight, self._name)
        self._made_of = (function, self._non_split, self._axes, detach_outputs, weight)
        self._check_names()

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what makes an equal function in another process, which has run no step yet."""
        return StepFunction, self._made_of

    def _check_names(self) -> None:
        parameters = self._signature.parameters
        if self._var_keyword is not None:
            return  # any name may come
        for option, names in (
            ("non_split_inputs", self._non_split),
            ("input_split_axes", self._axes.keys()),
        ):
            unknown = sorted({name.split(".")[0] for name in names} - parameters.keys())
            if unknown:
                raise ValueError(
                    f"{option} names {unknown}, but the step function '{self._name}' has the "
                    f"arguments {list(parameters)}"
                )

    @_outside_compiled
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        current = runtime.current()
        if current.step_to_repeat is not None:
            with current.rank.reporting(f"step '{self._name}'"):
                return cast(R, going_on.repeat(current, self._name))
        if current.steps.running is None:
            preemption.before_step(current)
        current.steps.begin(self._name)
        try:
            current.wrapped.spread_written()
            # The models are kept until the step is over: garbage is collected at any time.
            models = current.wrapped.models
            if current.rank.config.on_failure == "spare":
                taking_over.refuse_missing(current, self._name)
            if current.survivors is None:
                alone: R = self._run(current, models, args, kwargs)
                return alone
            known, trains = self._known.get(current), torch.is_grad_enabled()
            # In a process that has taken a place the models are laid out and checked already.
            has_run = known is not None and trains in known.has_run
            has_run = has_run or (known is None and current.has_taken_place)
            result: R = going_on.run(
                current, self._name, has_run, lambda: self._run(current, models, args, kwargs)
            )
            self._known[current].has_run.add(trains)
            return result
        except BaseException as error:  # sys.exit and Ctrl-C, too
            current.rank.report_raised(f"step '{self._name}'", error)
            raise
        finally:
            current.steps.running = None

    def _run(
        self,
        current: runtime.Runtime,
        models: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs one step. Numbers are those of "One training step" in ARCHITECTURE.md."""
        started_s, trains = time.perf_counter(), torch.is_grad_enabled()
        steps, wrapped, is_driver = current.steps, current.wrapped, current.rank.ranks["pp"] == 0
        if steps.has_faults:
            steps.inject_fault(steps.num_begun)
        # 4. The arguments are read; every rank knows the number of its microbatches.
        batches, count = self._batches(current, args, kwargs)

        def run_first_body() -> None:
            self._bodies(current, batches, count)(0)

        # 3. The models that are used for the first time are partitioned.
        if len(wrapped.partitioned) < wrapped.num_wrapped:
            partition_used(current, models, self, run_first_body)
        engines = list(wrapped.engines.values())
        step_run = StepRun(current, engines, self._name, trains)
        try:
            # 4. Microbatches are weighed, and the ranks agree on the number of those of the driver.
            weights = None
            if is_driver:  # others may have dummies of any shape
                if not self._rule.has_looked:
                    used = [model for model in models if model.partitioned]
                    self._rule.look_for_labels(current, used, batches[0], run_first_body)
                weights = self._rule.weigh(current, engines, batches)
            if current.rank.config.layout_independent_dropout:
                step_run.number_samples(batches)
            count = step_run.begin(count, weights, batches[0].cutting)
            # 5. to 7. The function runs once for each microbatch.
            bodies = self._bodies(current, batches, count, weights)
            if models:
                step_run.run(count, bodies)
            else:
                run_without_model(current, self._name, count, bodies, trains=trains)
            # 8. The reduction of gradients ends.
            step_run.end()
        except BaseException as error:
            step_run.fail(error)
            raise
        # 9. Every rank has the values of all microbatches.
        result = microbatch.join(
            bodies.results,
            self._detach_outputs,
            bodies.weights if set(bodies.weights) != {1.0} else None,
        )
        if trains:
            self._show_trained(current, engines, batches[0])
            steps.has_gradients = True
            for optimizer in list(wrapped.numbered_optimizers.values()):
                optimizer._step_done()
        for model in models:
            if model._post_step_hooks:
                model.run_post_step_hooks()
        if current.verification is not None:
            counts = [batch.count for batch in batches] if len(batches) > 1 else [count]
            current.verification.step_done(trains, result, counts)
        steps.num_finished += 1
        duration_s = time.perf_counter() - started_s
        for see in current.observers.step_returned:
            see(duration_s, trains=trains, num_samples=steps.samples if is_driver else 0)
        return result

    def _batches(
        self, current: runtime.Runtime, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Batch], int]:
        """Returns the batches that this process reads, and the number of their microbatches."""
        known = self._known.get(current)
        if known is None:
            known = self._known[current] = _Known(Rules(self._non_split, self._axes))
            if self._var_positional is not None:
                known.rules.known[self._var_positional,] = Reading.INSIDE
        verification = current.verification
        calls = [(args, kwargs)] if verification is None else verification.calls(args, kwargs)
        batches, total, num_samples = list[Batch](), 0, 0
        for part, (own_args, own_kwargs) in enumerate(calls):
            bound = self._signature.bind(*own_args, **own_kwargs)
            named = dict(bound.arguments)
            if self._var_keyword is not None:
                named |= named.pop(self._var_keyword, {})
            cutting = Cutting(named, known.rules)
            count = cutting.count(current.rank.config.microbatches)
            batches.append(Batch(bound, cutting, count, part if len(calls) > 1 else None))
            total += count
            num_samples += cutting.num_samples
        if batches[0].count > 1 and current.rank.global_rank == 0:
            for kind, text in batches[0].cutting.remarks(batches[0].count).items():
                if first_rank_log.is_new((self, kind)):
                    first_rank_log.warning("smp: step '%s' %s", self._name, text)
        current.steps.samples = num_samples
        return batches, total

    def _bodies(
        self,
        current: runtime.Runtime,
        batches: Sequence[Batch],
        count: int,
        weights: BatchWeights | None = None,
    ) -> MicrobatchRunner:
        """Makes the bodies of a step, which has ``count`` microbatches."""
        function, draws = self._function, current.dropout
        if current.verification is not None:
            function = current.verification.around(function)
        if draws is not None and not draws.is_open:
            draws = None
        if len(batches) == 1:
            return Bodies(current, function, batches[0], count, weights, 0, draws)
        parts, first_mb = [], 0
        for batch in batches:
            parts.append(Bodies(current, function, batch, batch.count, weights, first_mb, draws))
            first_mb += batch.count
        return BodiesOfRanks(current, parts)

    def _show_trained(
        self, current: runtime.Runtime, engines: Sequence[Engine], batch: Batch
    ) -> None:
        """Shows a step to the observers, which may run its function again, until they know it."""
        known, observers = self._known[current], current.observers
        step = observers.version, [(engine.idx, engine.uneven is None) for engine in engines]
        # A process that has taken a place has not seen the first calls, with which others are done.
        if step == known.shown or current.has_newcomers:
            return

        def make(own: Batch) -> Bodies:
            return Bodies(current, self._function, own, own.count)

        trained = TrainedStep(engines, self._name, self._function, batch, self._rule, make)
        if not any([see(trained) for see in observers.step_trained]):
            known.shown = step


@dataclass
class _Known:
    """The knowledge of a step function in one runtime.

    Attributes:
        rules: rules by which arguments are cut, and readings of earlier calls.
        shown: version of the observers, and models, for which none wants to see another step.
        has_run: whether gradients were enabled in calls that have returned.
    """

    rules: Rules
    shown: object = None
    has_run: set[bool] = field(default_factory=set)


class StepDecorator(Protocol):
    """A decorator, which `smp.step` returns when it gets options."""

    @overload
    def __call__(self, function: Callable[P, Tensor], /) -> StepFunction[P, StepOutput]: ...
    @overload
    def __call__(
        self, function: Callable[P, dict[str, Tensor]], /
    ) -> StepFunction[P, dict[str, StepOutput]]: ...
    @overload
    def __call__(
        self, function: Callable[P, tuple[Tensor, Tensor]], /
    ) -> StepFunction[P, tuple[StepOutput, StepOutput]]: ...
    @overload
    def __call__(self, function: Callable[P, Any], /) -> StepFunction[P, Any]: ...


@overload
def step(function: Callable[P, Tensor], /) -> StepFunction[P, StepOutput]: ...
@overload
def step(function: Callable[P, dict[str, Tensor]], /) -> StepFunction[P, dict[str, StepOutput]]: ...
@overload
def step(
    function: Callable[P, tuple[Tensor, Tensor]], /
) -> StepFunction[P, tuple[StepOutput, StepOutput]]: ...
@overload
def step(function: Callable[P, Any], /) -> StepFunction[P, Any]: ...
@overload
def step(
    *,
    non_split_inputs: Iterable[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
    weight: str | Callable[..., Any] = "auto",
) -> StepDecorator: ...
def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Iterable[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
    weight: str | Callable[..., Any] = "auto",
) -> Any:
    """Decorates the function that runs forward and backward of one batch.

    A call cuts the samples of its arguments into ``microbatches`` pieces and runs the function once
    per piece on every rank of the replica, pipelined. The number of samples is the number that most
    arguments support: tensors of so many rows and lists of so many entries are cut, also inside of
    containers, and the rest is whole in each piece (docs/design/cutting.md). On return the
    backward of all microbatches and the data-parallel reduction are done. Collective: every rank
    calls the same step functions in one order.

    A batch that ``microbatches`` does not divide is cut into pieces that differ by one sample, and
    into fewer pieces if there are fewer samples. The batch of pipeline rank 0 counts.

    The reference is the loss of the global batch, that is of the batches of all replicas, in one
    process. A loss that is a mean counts in it by its ``weight``: the divisor of the mean in its
    microbatch, over the sum of the divisors of all microbatches of all replicas. A backward
    begins with that share, so gradients, their norm, and hooks on tensors are those of the global
    batch. So is the mean over the replicas of ``reduce_mean``; in evaluation ``reduce_mean`` is
    that of the batch of this replica. Microbatches of weight 0 have no backward.

    The first call runs the function once more on pipeline rank 0 of the first replica, up to its
    call of the model, to trace that call for the automatic partition. Side effects before the call
    happen twice there; `smp.is_tracing` returns whether the trace runs. With several models the
    trace goes on, with results of zeros and without backward, until all models that are not
    partitioned yet have been called. Models that are not called wait for a step function that calls
    them.

    Args:
        function: the function, when used without parentheses.
        non_split_inputs: names of arguments, or of entries of containers ("batch.mask"), passed
            whole to every microbatch.
        input_split_axes: batch dimension by such names; 0 for all others.
        detach_outputs: whether to detach returned tensors; otherwise their graphs stay alive.
        weight: quantity over which the loss of a microbatch is a mean. "samples": samples of the
            microbatch. A function: receives the arguments of one microbatch like the step function,
            and returns a number, or a tensor of one element (tokens that are not ignored, a sum of
            class weights, pairs). "auto": the labels that count, if a model of transformers gets
            its ``labels`` from an argument of the step function, otherwise samples. To find the
            argument, the first step runs the function once more up to its call of the model, on
            ranks that read a batch; `smp.is_tracing` is true there, too.

    Returns:
        a callable; its result has the structure of the function's, with a ``StepOutput`` for each
            tensor, a list for each other leaf, and ``None`` if all microbatches returned ``None``.

    Raises:
        TypeError: a weight is neither of these.
        ValueError: an argument lacks its batch dimension, or has entries of a sample in two
            microbatches; weights are negative or not finite; replicas count different things.
        smp.PeerFailure: another rank has failed meanwhile.
    """

    def decorate(decorated: Callable[..., Any]) -> StepFunction[..., Any]:
        return StepFunction(decorated, non_split_inputs, input_split_axes, detach_outputs, weight)

    return decorate if function is None else decorate(function)
