"""Partitions models in the first call of a step function that uses them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import nn

import smp._C as _C
from smp.model import DistributedModel, engine_of
from smp.partition.capture import Capture, Captured
from smp.partition.costs import Trace
from smp.partition.trace_guard import without_hooks_on_all_modules
from smp.world import comm, runtime

_log = logging.getLogger("smp")


def partition_used(
    current: runtime.Runtime,
    models: Sequence[DistributedModel],
    step: object,
    run_body: Callable[[], object],
) -> None:
    """Partitions the models that a step function uses, if they are not. Collective.

    The first rank finds the used models in the trace. If a function did not call a model in its
    first call after that was wrapped, it is not traced for the model again. A single model counts
    as used. Observers may explain errors.

    Args:
        current: the runtime.
        models: all wrapped models.
        step: the step function.
        run_body: runs it on the first microbatch.
    """
    # The numbers are equal on all ranks: models deleted here may still live elsewhere.
    passed_over = current.wrapped.passed_over.setdefault(step, set())
    undecided = set(range(current.wrapped.num_wrapped)) - current.wrapped.partitioned - passed_over
    if not undecided:
        return
    try:
        used = _partition(current, models, undecided, run_body)
    except BaseException as error:
        for see in current.observers.failed:
            see("the partition of a model", error)
        raise
    passed_over.update(undecided - used)


def _partition(
    current: runtime.Runtime,
    models: Sequence[DistributedModel],
    undecided: set[int],
    run_body: Callable[[], object],
) -> set[int]:
    """Partitions used models among the undecided ones; returns their numbers."""
    waiting = [model for model in models if engine_of(model).idx in undecided]
    used = {engine_of(model).idx for model in waiting}
    traces: dict[nn.Module, Trace | None] = {}
    if current.rank.global_rank == 0 and any(
        engine_of(model).partitioning.wants_trace for model in waiting
    ):
        traces, used = _trace(current, models, waiting, run_body)
    if current.wrapped.num_wrapped > 1:
        alive = {engine_of(model).idx for model in waiting}
        told: list[tuple[set[int], set[int]]] = comm.allgather((used, alive), comm.WORLD)
        used = told[0][0].intersection(*(alive for _, alive in told))
    for model in waiting:
        if engine_of(model).idx in used:
            model.prepare(traces.get(model.get_module()))
    return used


def _trace(
    current: runtime.Runtime,
    models: Sequence[DistributedModel],
    waiting: Sequence[DistributedModel],
    run_body: Callable[[], object],
) -> tuple[dict[nn.Module, Trace | None], set[int]]:
    """Returns traces, and the numbers of the models to be partitioned."""
    engines = [engine_of(model) for model in models]
    capture = Capture(
        [
            Captured(
                model.get_module(), engine_of(model).partitioning.trace_options, model in waiting
            )
            for model in models
        ]
    )
    outside = _C.RandomState.capture(str(current.rank.device))
    for engine in engines:
        engine.capture = capture
    try:
        with without_hooks_on_all_modules():
            traces = capture.run(run_body)
    finally:
        for engine in engines:
            engine.capture = None
        outside.restore()
    used = {engine_of(model).idx for model in waiting if model.get_module() in traces}
    if current.wrapped.num_wrapped == 1 and not used:
        _log.warning(
            "smp: the first call of a step function does not call the model, so the partition uses "
            "parameter sizes only"
        )
    if current.wrapped.num_wrapped == 1 or capture.ended_early:
        used = {engine_of(model).idx for model in waiting}
    return traces, used
