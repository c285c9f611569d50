"""``@smp.step``: runs a function once per microbatch, pipelined over the ranks of a replica."""

from __future__ import annotations

import contextvars
import functools
import inspect
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from smp.data_parallel import BatchWeights
from smp.dropout import places
from smp.dropout.places import Place
from smp.model import DistributedModel, engine_of
from smp.model.engine import Engine
from smp.model.share import Share, set_share
from smp.modules import autocast
from smp.pipeline import begin_context
from smp.step import microbatch
from smp.step.batches import Batch, MicrobatchArguments, MicrobatchRunner, TrainedStep, make_bodies
from smp.step.cutting import Cutting
from smp.step.differentiation import explaining_derivatives
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


class StepFunction:
    """A function that runs once per microbatch.

    It is callable, but no descriptor: in a class body it stays a plain function and does not
    receive ``self``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
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
        self._rules: weakref.WeakKeyDictionary[runtime.Runtime, Rules] = weakref.WeakKeyDictionary()
        self._detach_outputs = detach_outputs
        self._rule = WeightRule(weight, self._name)
        self._check_names()

    def _check_names(self) -> None:
        parameters = self._signature.parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
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

    @torch._disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = runtime.current()
        if current.steps.running is None:
            preemption.before_step(current)
        with current.steps.exclusive(self._name), current.rank.reporting(f"step '{self._name}'"):
            return self._run(current, args, kwargs)

    def _run(self, current: runtime.Runtime, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        started_s = time.perf_counter()
        current.steps.inject_fault(current.steps.num_begun)
        current.wrapped.spread_written()
        # Keep the models until the step is over: garbage is collected at any time.
        models = [model for model in current.wrapped.models if isinstance(model, DistributedModel)]
        trains, seed = torch.is_grad_enabled(), torch.initial_seed() & (2**64 - 1)
        verification = current.verification
        calls = [(args, kwargs)] if verification is None else verification.calls(args, kwargs)
        batches = [
            self._batch(current, call, part if len(calls) > 1 else None)
            for part, call in enumerate(calls)
        ]
        self._tell_of_cuts(current, batches[0])
        count = sum(batch.count for batch in batches)
        current.steps.samples = sum(batch.num_samples for batch in batches)

        def bodies_of(num_microbatches: int, weights: BatchWeights | None) -> MicrobatchRunner:
            make = functools.partial(self._bodies, current, weights)
            return make_bodies(current, batches, num_microbatches, seed, make)

        def begin_body() -> None:
            bodies_of(count, None)(0)

        with _explaining(current, "the partition of a model"):
            partition_used(current, models, self, begin_body)
        used = [model for model in models if model.partitioned]
        engines = [engine_of(model) for model in used]
        step_run = StepRun(current, engines, self._name, trains)
        with _explaining(current, f"step '{self._name}'", step_run.abandon):
            weights = None
            if current.rank.ranks["pp"] == 0:  # others may have dummies of any shape
                self._rule.look_for_labels(current, used, batches[0], begin_body)
                weights = self._rule.weigh(current, engines, batches)
            step_run.number_samples(batches)
            cut = {name: tensor for name, tensor, _ in batches[0].cutting.tensors()}
            count = step_run.begin(count, weights, cut)
            bodies = bodies_of(count, weights)
            if models:
                step_run.run(count, bodies)
            else:
                run_without_model(current, self._name, count, bodies, trains=trains)
            step_run.end()
        if trains:
            self._show_trained(current, engines, batches[0])
            current.steps.has_gradients = True
            for optimizer in current.wrapped.optimizers:
                optimizer._step_done()
        for model in models:
            model.run_post_step_hooks()
        result = microbatch.join(
            [bodies.results[mb] for mb in range(count)],
            self._detach_outputs,
            bodies.output_weights(),
        )
        if verification is not None:
            counts = [batch.count for batch in batches] if len(batches) > 1 else [count]
            verification.step_done(trains, result, counts)
        samples = current.steps.samples if current.rank.ranks["pp"] == 0 else 0
        duration_s = time.perf_counter() - started_s
        current.steps.finished(duration_s)
        for see in current.observers.step_returned:
            see(duration_s, trains=trains, num_samples=samples)
        return result

    def _batch(
        self,
        current: runtime.Runtime,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        part: int | None,
    ) -> Batch:
        args, kwargs = call
        bound = self._signature.bind(*args, **kwargs)
        return Batch.of(current, bound, Cutting(_named(bound), self._rules_in(current)), part)

    def _rules_in(self, current: runtime.Runtime) -> Rules:
        """Returns the rules by which arguments are cut; readings of calls end with the runtime."""
        if current not in self._rules:
            parameters = self._signature.parameters.values()
            known: dict[tuple[str, ...], Reading] = {
                (parameter.name,): Reading.INSIDE
                for parameter in parameters
                if parameter.kind is parameter.VAR_POSITIONAL
            }
            self._rules[current] = Rules(self._non_split, self._axes, known)
        return self._rules[current]

    def _tell_of_cuts(self, current: runtime.Runtime, batch: Batch) -> None:
        """Logs remarks about the cutting, once each."""
        if batch.count == 1 or current.rank.global_rank != 0:
            return
        for kind, text in batch.cutting.remarks(batch.count).items():
            if first_rank_log.is_new((self, kind)):
                first_rank_log.warning("smp: step '%s' %s", self._name, text)

    def _bodies(
        self,
        current: runtime.Runtime,
        weights: BatchWeights | None,
        batch: Batch,
        count: int,
        first_mb: int,
    ) -> _Bodies:
        shares = [Share(weights, first_mb + mb) for mb in range(count)]
        function = self._function
        if current.verification is not None:
            function = current.verification.around(function)
        place_of = None
        if current.dropout is not None and current.dropout.is_open:
            place_of = functools.partial(current.dropout.body, part=batch.part)
        return _Bodies(current, function, batch.pieces(count), shares, place_of)

    def _show_trained(
        self, current: runtime.Runtime, engines: Sequence[Engine], batch: Batch
    ) -> None:
        """Shows a step that has trained to observers, which may run its function again."""

        def make(own: Batch) -> MicrobatchRunner:
            shares = [Share(None, mb) for mb in range(own.count)]
            return _Bodies(current, self._function, own.pieces(own.count), shares, None)

        step = TrainedStep(engines, self._name, self._function, batch, self._rule, make)
        for see in current.observers.step_trained:
            see(step)


class _explaining:
    """Lets observers explain an error of the block, and ends unfinished work.

    Args:
        current: the runtime.
        doing: description of the work of the block.
        abandon: ends the work after an error, also after one of the interpreter.
    """

    def __init__(
        self, current: runtime.Runtime, doing: str, abandon: Callable[[], None] | None = None
    ) -> None:
        self._current, self._doing, self._abandon = current, doing, abandon

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            return
        try:
            for see in self._current.observers.failed:
                see(self._doing, error)
        finally:
            if self._abandon is not None:
                self._abandon()


def _named(bound: inspect.BoundArguments) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named


class _Bodies:
    """Runs the function for one microbatch after the other, in the calling thread."""

    def __init__(
        self,
        current: runtime.Runtime,
        function: Callable[..., Any],
        pieces: MicrobatchArguments,
        shares: Sequence[Share],
        place_of: Callable[[int], Place] | None,
    ) -> None:
        self._current = current
        self._device = current.rank.device
        self._function = function
        self._pieces = pieces
        self._shares = shares
        self._place_of = place_of
        self._autocast = autocast.capture(self._device)
        self._context = contextvars.copy_context()
        self.results: dict[int, Any] = {}

    def __call__(self, mb: int) -> None:
        own = self._pieces.of(mb)

        def run() -> Any:
            current = self._current
            current.steps.inject_fault(current.steps.num_begun - 1, mb)
            set_share(self._shares[mb])
            begin_context({})
            if self._place_of is not None:
                places.enter(self._place_of(mb))  # affects a copy of the context only
            with autocast.apply(self._autocast), explaining_derivatives(current):
                return self._function(*own.args, **own.kwargs)

        try:
            self.results[mb] = self._context.copy().run(run)
        finally:
            self._shares[mb].outputs.clear()  # the graph may keep the context of its forward

    def output_weights(self) -> list[float] | None:
        """Returns weights of the microbatches' outputs, if they differ; after they have run."""
        weights = [share.weight for share in self._shares]
        return weights if any(weight != 1.0 for weight in weights) else None


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

    def decorate(decorated: Callable[..., Any]) -> StepFunction:
        return StepFunction(decorated, non_split_inputs, input_split_axes, detach_outputs, weight)

    return decorate if function is None else decorate(function)
