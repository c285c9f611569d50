"""Gives the state of a rank to a process that takes the place of a lost one.

The layout stays, so a rank of another replica with the same place in it has the same parts of the
same tensors. Its memory is sent and written as it is. See docs/design/going_on.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp.model import DistributedModel
from smp.model.engine import Engine
from smp.partition.together import ModulePlaces
from smp.precision.holdings import model_parameter_of, parameters_of
from smp.world import comm, runtime
from smp.world.comm import RankType

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

    Args:
        user_content: returns the content that the script needs to go on, such as the number of the
            next step and the state of a scheduler. A rank of another replica calls it, inside of
            the call of a step function, when a process takes a place.

    Returns:
        None on ranks that begin the job; in a process that takes a place the content.

    Raises:
        ValueError: the configuration lacks ``on_failure="spare"``, or no model is wrapped.
        RuntimeError: the model or the optimizer is not that of the other ranks.
        SystemExit: the others go on without this process.
    """
    current = runtime.current()
    _refuse(current)
    current.content_to_give = user_content
    if not current.rank.is_apart:
        return None
    try:
        decision = current.join()
        if decision is None:
            _log.warning("%sthe other ranks go on without this process", _C.rank_prefix())
            raise SystemExit(0)
        with current.rank.reporting("smp.take_over"):
            state = _receive(current, dict(decision.newcomers))
            assert current.survivors is not None
            current.survivors.confirm()
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
    if current.content_to_give is None or current.rank.is_apart:
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
        tensors: entries of the state dict that are on this rank.
        buffers: all buffers, also those that are in no state dict.
        marks: see `Engine.marks`.
    """

    tensors: dict[str, Any]
    buffers: list[Tensor]
    marks: tuple[Any, ...]


@dataclass(frozen=True)
class _OptimizerState:
    """The state of an optimizer on a rank.

    Attributes:
        groups: hyperparameters.
        masters: value of each tensor that is updated in place of a parameter; None: a parameter.
        entries: state of each tensor.
        scaler: state of the loss scale.
    """

    groups: list[dict[str, Any]]
    masters: list[Tensor | None]
    entries: list[dict[str, Any]]
    scaler: dict[str, Any]


@dataclass(frozen=True)
class _State:
    models: dict[int, _ModelState]
    optimizers: list[_OptimizerState]
    counts: dict[str, Any]
    user_content: Any


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
    if not served:
        return
    assert current.content_to_give is not None
    state = _State(
        {idx: _state_of(engine) for idx, engine in current.wrapped.engines.items()},
        [_optimizer_state(optimizer) for optimizer in current.wrapped.optimizers],
        {name: getattr(current.steps, name) for name in _COUNTS},
        current.content_to_give(),
    )
    for newcomer in served:
        comm.send(state, newcomer, RankType.WORLD_RANK)


def _donor(current: runtime.Runtime, newcomers: Collection[int]) -> int:
    """Returns the rank that gives its state to the newcomers with the same place as this rank."""
    return min(rank for rank in current.rank.groups["rdp"] if rank not in newcomers)


def _served(current: runtime.Runtime, newcomers: Collection[int]) -> list[int]:
    """Returns the newcomers that get the state of this rank."""
    if _donor(current, newcomers) != current.rank.global_rank:
        return []
    return [rank for rank in current.rank.groups["rdp"] if rank in newcomers]


def _state_of(engine: Engine) -> _ModelState:
    assert engine.parts is not None
    return _ModelState(engine.parts.local_state(), list(engine.root.buffers()), engine.marks)


def _optimizer_state(optimizer: Any) -> _OptimizerState:
    own = optimizer.optimizer
    updated = list(parameters_of(own))
    return _OptimizerState(
        [_options(group) for group in own.param_groups],
        [None if model_parameter_of(tensor) is tensor else tensor.detach() for tensor in updated],
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
    state: _State = comm.recv_from(donor, RankType.WORLD_RANK)
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
    return state


def _fill_model(engine: Engine, given: _ModelState) -> None:
    assert engine.parts is not None
    engine.parts.load(given.tensors, strict=False, sliced=True)
    for buffer, value in zip(engine.root.buffers(), given.buffers, strict=True):
        buffer.copy_(value)
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
    for tensor, master, entry in zip(updated, given.masters, given.entries, strict=True):
        if master is not None:
            tensor.copy_(master)
        if entry:
            own.state[tensor] = entry
    optimizer.loss_scaler.load_state_dict(given.scaler)
