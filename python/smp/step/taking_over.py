"""Gives the state of a rank to a process that takes the place of a lost one.

The layout stays, so a rank of another replica with the same place in it has the same parts of the
same tensors. Its memory is sent and written as it is. With `redundancy` the source is a copy that
another rank has kept. See docs/design/going_on.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp.model import DistributedModel
from smp.model.engine import Engine
from smp.model.parts import set_extra_states
from smp.modules import packed
from smp.partition.together import ModulePlaces
from smp.precision.holdings import master_of, parameters_of
from smp.step import copies
from smp.step.copy_memory import KeptCopy
from smp.world import comm, host_objects, runtime
from smp.world.between_steps import Known, known_to
from smp.world.comm import RankType
from smp.world.preemption import leave_without_place

_log = logging.getLogger("smp")
_COUNTS = (
    "num_begun", "num_finished", "num_passes", "has_trained", "dropout_seed"
)  # fmt: skip


def take_over(user_content: Callable[[], Any]) -> Any:
    """Gets the state of the job in a process that takes the place of a lost rank.

    Call it on all ranks with ``on_failure="spare"``, once, when models and optimizers are wrapped
    and before the first step. In a process that has waited, models, optimizers and loss scales get
    the state of a rank of another replica with the same place in the layout. Collective with the
    other ranks, which are in the call of a step function that they run again.

    With ``redundancy`` the state is the copy that another rank has of the lost one. It is of the
    end of the last finished step, and the call of this step returns at once, with its result.

    Args:
        user_content: returns the content that the script needs to go on, such as the number of the
            present step and the state of a scheduler. A rank of another replica calls it, inside of
            the call of a step function, when a process takes a place; with ``redundancy`` each rank
            calls it at the end of each step.

    Returns:
        None on ranks that begin the job; in a process that takes a place the content.

    Raises:
        ValueError: the configuration lacks ``on_failure="spare"``, or no model is wrapped.
        RuntimeError: the model or the optimizer is not that of the other ranks.
        SystemExit: the others go on without this process.
    """
    current = runtime.current()
    _refuse(current)
    is_new = current.newcomer is not None
    current.content_to_give = user_content
    if not is_new:
        return None
    try:
        decision = current.join()
        if decision is None:
            _log.warning("%sthe other ranks go on without this process", _C.rank_prefix())
            leave_without_place(current.rank)
        with current.rank.reporting("smp.take_over"):
            state = _receive(current, dict(decision.newcomers))
            assert current.survivors is not None
            current.survivors.confirm()
            current.rank.is_apart = current.rank.gathers_later = True
    except BaseException:
        if current.survivors is not None:
            current.survivors.withdraw()
        raise
    return state.user_content


def _refuse(current: runtime.Runtime) -> None:
    policy = current.rank.config.on_failure
    reasons = {
        f"on_failure={policy!r}, so no process takes a place; pass 'spare' to smp.init": (
            policy != "spare"
        ),
        "no model is wrapped yet; wrap it in smp.DistributedModel first": (
            not current.wrapped.models
        ),
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ValueError(f"{_C.rank_prefix()}smp.take_over: {reason}")


def refuse_missing(current: runtime.Runtime, name: str) -> None:
    """Raises if a step of a job with spares begins without `take_over`, or with other state.

    Args:
        current: the runtime.
        name: name of the step function.

    Raises:
        RuntimeError: on all ranks.
    """
    others = current.torch_optimizers
    if others is not None and len(others.own):
        raise RuntimeError(
            f"{_C.rank_prefix()}step '{name}': an optimizer is not wrapped, and processes that "
            "take the places of lost ranks would not get its state (on_failure='spare'); wrap it "
            "in smp.DistributedOptimizer"
        )
    if current.rank.keepers and any(
        optimizer.whole_tensors.has_some for optimizer in current.wrapped.optimizers
    ):
        raise RuntimeError(
            f"{_C.rank_prefix()}step '{name}': an optimizer exchanges whole tensors between ranks "
            "in its update, which a process that takes a place cannot repeat alone; set "
            'redundancy=0, or optimizer_state="elements" where the optimizer allows it'
        )
    if current.content_to_give is None or current.newcomer is not None:
        raise RuntimeError(
            f"{_C.rank_prefix()}step '{name}' was called before smp.take_over, by which processes "
            "that take the places of lost ranks get their state (on_failure='spare'); call it when "
            "models and optimizers are wrapped"
        )


# ---- what is sent --------------------------------------------------------------------


@dataclass(frozen=True)
class _ModelState:
    """The state of a model on a rank.

    Attributes:
        tensors: parameters of this rank, or its parts of them, and their masters.
        buffers: all buffers, also those that are in no state dict.
        extra: see `ModelParts.extra_states`.
        marks: see `Engine.marks`.
    """

    tensors: list[Tensor]
    buffers: list[Tensor]
    extra: dict[str, Any]
    marks: tuple[Any, ...]


@dataclass(frozen=True)
class _OptimizerState:
    """The state of an optimizer on a rank.

    Attributes:
        groups: hyperparameters.
        entries: state of each tensor.
        scaler: state of the loss scale.
    """

    groups: list[dict[str, Any]]
    entries: list[dict[str, Any]]
    scaler: dict[str, Any]


@dataclass(frozen=True)
class _State:
    models: dict[int, _ModelState]
    optimizers: list[_OptimizerState]
    counts: dict[str, Any]
    user_content: Any


@dataclass(frozen=True)
class _StateAfter:
    """The state of a rank whose step function returns.

    Attributes:
        state: state; its content is packed.
        name: name of the step function.
        result: result of that call.
        is_content_old: whether the content is that after the call before, too.
        has_gradients, missed_at: see `Steps`.
        gradients: gradients of the parameters of each model.
        scales: see `ScaledGradients.marks`, by optimizer.
    """

    state: _State
    name: str
    result: Any
    is_content_old: bool
    has_gradients: bool
    missed_at: str | None
    gradients: list[list[Tensor | None]]
    scales: list[tuple[Any, ...]]


@dataclass(frozen=True)
class Repeated:
    """The end of the last finished step, as a process with a copy begins with it.

    Attributes:
        result: result of the step function.
        content: packed content of the script.
        known: knowledge of the other ranks about the time since then.
    """

    result: Any
    content: bytes
    known: Known


def state_after(
    current: runtime.Runtime, name: str, result: Any, content: bytes, is_content_old: bool
) -> _StateAfter:
    """Returns the state of this rank when a step function returns.

    Args:
        current: the runtime.
        name: name of the step function.
        result: result of that call.
        content: packed content of the script.
        is_content_old: whether it is that after the call before, too.
    """
    return _StateAfter(
        _own_state(current, content),
        name,
        result,
        is_content_old,
        current.steps.has_gradients,
        current.steps.missed_at,
        [
            [None if tensor.grad is None else tensor.grad.detach() for tensor in tensors]
            for tensors in _with_gradients(current)
        ],
        [optimizer._gradients.marks for optimizer in current.wrapped.optimizers],
    )


def _with_gradients(current: runtime.Runtime) -> list[list[Tensor]]:
    """Returns the tensors of each model that have gradients in training."""
    roots = [engine.root for engine in current.wrapped.engines.values()]
    return [[master_of(parameter) for parameter in root.parameters()] for root in roots]


def give_places(current: runtime.Runtime, newcomers: Collection[int]) -> None:
    """Sends newcomers the partition of each model. Collective with `take_over` in these.

    Args:
        current: the runtime.
        newcomers: global ranks that have no state yet.

    Raises:
        RuntimeError: a wrapped model is not partitioned.
    """
    wrapped = current.wrapped
    if len(wrapped.engines) < len(wrapped.models):
        raise RuntimeError(
            f"{_C.rank_prefix()}a process cannot take a place while a model is wrapped that no "
            f"step function has used ({wrapped.candidates}); wrap it when it is needed"
        )
    for newcomer in _served(current, newcomers):
        if current.rank.keepers:
            copies.copy_of(current, newcomer)  # before the others wait for it
    places = {
        idx: ModulePlaces.of(engine.partitioning.decision)
        for idx, engine in wrapped.engines.items()
    }
    for newcomer in _served(current, newcomers):
        comm.send(places, newcomer, RankType.WORLD_RANK)


def give_state(current: runtime.Runtime, newcomers: Collection[int]) -> None:
    """Sends newcomers the state of their place. Collective with `take_over` in these.

    Args:
        current: the runtime, whose step is to be run again.
        newcomers: global ranks that have no state yet.
    """
    served = _served(current, newcomers)
    if current.rank.keepers:
        for newcomer in served:
            comm.send(copies.copy_of(current, newcomer), newcomer, RankType.WORLD_RANK)
        assert current.copies is not None
        current.copies.noted = comm.allgather(current.copies.notes, comm.WORLD)
        return
    if not served:
        return
    assert current.content_to_give is not None
    state = _own_state(current, current.content_to_give())
    for newcomer in served:
        comm.send(state, newcomer, RankType.WORLD_RANK)


def _own_state(current: runtime.Runtime, content: Any) -> _State:
    return _State(
        {idx: _state_of(engine) for idx, engine in current.wrapped.engines.items()},
        [_optimizer_state(optimizer) for optimizer in current.wrapped.optimizers],
        {name: getattr(current.steps, name) for name in _COUNTS},
        content,
    )


def _donor(current: runtime.Runtime, newcomers: Collection[int]) -> int:
    """Returns the rank that gives their state to the newcomers with the same place as this rank."""
    if current.rank.keepers:
        return current.rank.keepers[current.rank.global_rank]
    return min(rank for rank in current.rank.groups["rdp"] if rank not in newcomers)


def _served(current: runtime.Runtime, newcomers: Collection[int]) -> list[int]:
    """Returns the newcomers that get their state from this rank."""
    if current.rank.keepers:
        ward = current.rank.keepers.index(current.rank.global_rank)
        return [ward] if ward in newcomers else []
    if _donor(current, newcomers) != current.rank.global_rank:
        return []
    return [rank for rank in current.rank.groups["rdp"] if rank in newcomers]


def _state_of(engine: Engine) -> _ModelState:
    assert engine.parts is not None and engine.storage is not None
    engine.storage.settle()
    extra = engine.parts.extra_states()
    return _ModelState(_tensors_of(engine), list(engine.root.buffers()), extra, engine.marks)


def _tensors_of(engine: Engine) -> list[Tensor]:
    """Returns the memory of this rank's parameters, or of its parts of them, and of masters."""
    assert engine.parts is not None and engine.storage is not None
    found, storage = list[Tensor](), engine.storage
    for _, parameter in engine.parts.named_parameters():
        shard, holding = storage.shards.get(parameter), storage.holdings.get(parameter)
        values = packed.parts_of(parameter).values() if shard is None else [shard.piece]
        found += [value.detach() for value in values]
        if holding is not None and holding.has_copy:
            found.append(holding.master.detach())
    return found


def _optimizer_state(optimizer: Any) -> _OptimizerState:
    own = optimizer.optimizer
    updated = list(parameters_of(own))
    return _OptimizerState(
        [_options(group) for group in own.param_groups],
        [dict(own.state.get(tensor, {})) for tensor in updated],
        optimizer.loss_scaler.state_dict(),
    )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


# ---- what is received ----------------------------------------------------------------


def _receive(current: runtime.Runtime, newcomers: Collection[int]) -> _State:
    """Lays out the models as the other ranks have, and fills them. Collective with them."""
    donor = _donor(current, newcomers)
    places: dict[int, ModulePlaces] = comm.recv_from(donor, RankType.WORLD_RANK)
    models = [model for model in current.wrapped.models if isinstance(model, DistributedModel)]
    if [model._idx for model in models] != list(places):
        raise RuntimeError(
            f"{_C.rank_prefix()}smp.take_over: the other ranks have models {list(places)}, and "
            f"this process has {[model._idx for model in models]} (in the order in which they were "
            "wrapped); wrap the same ones before smp.take_over"
        )
    for model in models:
        if current.rank.sizes["pp"] > 1:
            current.wrapped.placed[model.get_module()] = places[model._idx]
        with current.rank.alone():
            model.prepare()
    if not current.rank.keepers:
        state: _State = comm.recv_from(donor, RankType.WORLD_RANK)
        _fill(current, state)
        return state
    kept: KeptCopy = comm.recv_from(donor, RankType.WORLD_RANK)
    known = known_to(current.rank.global_rank, comm.allgather(None, comm.WORLD))
    after: _StateAfter = host_objects.unpack_apart(kept.head, kept.memory, current.rank.device)
    _log.warning(
        "smp: %sstate after a call of step '%s' from the copy of %d bytes that rank %d has kept",
        _C.rank_prefix(),
        after.name,
        kept.num_bytes,
        donor,
    )
    if after.is_content_old:
        raise RuntimeError(
            f"{_C.rank_prefix()}smp.take_over: the content after the last finished call of a step "
            f"function, '{after.name}', is that after the call before, so this process cannot know "
            "where to go on; let it say which call of which step function is the present one"
        )
    _fill(current, after.state)
    current.step_to_repeat = lambda name: _repeat(current, kept, known, name)
    content = host_objects.unpack(after.state.user_content, current.rank.device)
    return replace(after.state, user_content=content)


def _repeat(
    current: runtime.Runtime,
    kept: KeptCopy,
    known: Known,
    name: str,
) -> Repeated:
    """Restores the state and the gradients after the last finished step, in place of its call.

    The script may have changed both before its call of the step function, which it did then, too.
    """
    current.step_to_repeat = None
    after: _StateAfter = host_objects.unpack_apart(kept.head, kept.memory, current.rank.device)
    if name != after.name:
        raise RuntimeError(
            f"{_C.rank_prefix()}smp.take_over: the last finished call of a step function was of "
            f"'{after.name}', and after it the script calls '{name}'; let its content lead to the "
            "call in which it was made"
        )
    _fill(current, after.state)
    for tensors, gradients in zip(_with_gradients(current), after.gradients, strict=True):
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient
    for optimizer, marks in zip(current.wrapped.optimizers, after.scales, strict=True):
        optimizer._gradients.restore_marks(marks)
    current.steps.has_gradients, current.steps.missed_at = after.has_gradients, after.missed_at
    return Repeated(after.result, after.state.user_content, known)


def _fill(current: runtime.Runtime, state: _State) -> None:
    with torch.no_grad():
        for idx, engine in current.wrapped.engines.items():
            _fill_model(engine, state.models[idx])
        optimizers = current.wrapped.optimizers
        if len(optimizers) != len(state.optimizers):
            raise RuntimeError(
                f"{_C.rank_prefix()}smp.take_over: the other ranks have {len(state.optimizers)} "
                f"optimizers, and this process has {len(optimizers)}; wrap the same ones before "
                "smp.take_over"
            )
        for optimizer, given in zip(optimizers, state.optimizers, strict=True):
            _fill_optimizer(optimizer, given)
    for name, value in state.counts.items():
        setattr(current.steps, name, value)


def _fill_model(engine: Engine, given: _ModelState) -> None:
    assert engine.storage is not None
    own, values = [*_tensors_of(engine), *engine.root.buffers()], [*given.tensors, *given.buffers]
    if [(t.shape, t.dtype) for t in own] != [(t.shape, t.dtype) for t in values]:
        raise RuntimeError(
            f"{_C.rank_prefix()}smp.take_over: model {engine.label} of this process has "
            f"{len(own)} parameters and buffers on this rank, and that of the other ranks has "
            f"{len(values)}, or they differ in shapes or dtypes; build the same model"
        )
    for tensor, value in zip(own, values, strict=True):
        tensor.copy_(value)
    set_extra_states(engine.root, given.extra)
    engine.storage.after_load()
    engine.restore_marks(given.marks)


def _fill_optimizer(optimizer: Any, given: _OptimizerState) -> None:
    own = optimizer.optimizer
    updated = list(parameters_of(own))
    if len(updated) != len(given.entries) or len(own.param_groups) != len(given.groups):
        raise RuntimeError(
            f"{_C.rank_prefix()}smp.take_over: an optimizer of the other ranks has "
            f"{len(given.entries)} parameters in {len(given.groups)} groups, that of this process "
            f"{len(updated)} in {len(own.param_groups)}; make the same groups"
        )
    for group, options in zip(own.param_groups, given.groups, strict=True):
        group.update(options)
    for tensor, entry in zip(updated, given.entries, strict=True):
        if entry:
            own.state[tensor] = entry
    optimizer.loss_scaler.load_state_dict(given.scaler)
