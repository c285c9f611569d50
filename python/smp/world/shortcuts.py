"""Attributes of the parts of a runtime, read on the runtime itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from smp import _C
from smp.config.schema import Config
from smp.world.connections import Connections
from smp.world.groups import Groups
from smp.world.settings import Settings
from smp.world.wrapped import WrappedModel, WrappedOptimizer

_T = TypeVar("_T")


class _Of(Generic[_T]):
    """An attribute of a part."""

    def __init__(self, path: str) -> None:
        self._part, _, self._name = path.partition(".")
        self._get = attrgetter(path)

    def __get__(self, owner: Any, cls: type | None = None) -> _T:
        value: _T = self._get(owner)
        return value

    def __set__(self, owner: Any, value: _T) -> None:
        setattr(getattr(owner, self._part), self._name, value)


class Shortcuts:
    """For rooms that are handed the whole runtime. New code takes the part that it needs."""

    config = _Of[Config]("rank.config")
    settings = _Of[Settings]("rank.settings")
    device = _Of[torch.device]("rank.device")
    grid = _Of[_C.ProcessGrid]("rank.grid")
    groups = _Of[dict[str, tuple[int, ...]]]("rank.groups")
    ranks = _Of[dict[str, int]]("rank.ranks")
    sizes = _Of[dict[str, int]]("rank.sizes")
    global_rank = _Of[int]("rank.global_rank")
    world_size = _Of[int]("rank.world_size")
    comms = _Of[Groups]("rank.comms")
    links = _Of[Connections | None]("rank.connections")
    board = _Of[_C.FaultBoard | None]("rank.board")
    report_raised = _Of[Callable[[str, BaseException], None]]("rank.report_raised")
    reporting = _Of[Callable[[str], AbstractContextManager[None]]]("rank.reporting")
    process_group = _Of[Callable[[str], dist.ProcessGroup]]("process_groups.of")

    partitioned = _Of[set[int]]("wrapped.partitioned")
    passed_over = _Of[weakref.WeakKeyDictionary[object, set[int]]]("wrapped.passed_over")
    add_model = _Of[Callable[[WrappedModel], int]]("wrapped.add_model")
    models = _Of[list[WrappedModel]]("wrapped.models")
    model = _Of[WrappedModel | None]("wrapped.model")
    num_wrapped = _Of[int]("wrapped.num_wrapped")
    candidates = _Of[str]("wrapped.candidates")
    add_optimizer = _Of[Callable[[WrappedOptimizer], None]]("wrapped.add_optimizer")
    on_next_optimizer = _Of[Callable[[Callable[[WrappedOptimizer], None]], None]](
        "wrapped.on_next_optimizer"
    )
    optimizers = _Of[list[WrappedOptimizer]]("wrapped.optimizers")

    num_begun = _Of[int]("steps.num_begun")
    num_steps = _Of[int]("steps.num_finished")
    running_step = _Of[str | None]("steps.running")
    has_trained = _Of[bool]("steps.has_trained")
    has_gradients = _Of[bool]("steps.has_gradients")
    num_scaled_backwards = _Of[int]("steps.num_scaled_backwards")
    exclusive_step = _Of[Callable[[str], AbstractContextManager[None]]]("steps.exclusive")
    scaling_loss = _Of[Callable[[], AbstractContextManager[None]]]("steps.scaling_loss")
    inject_fault = _Of[Callable[..., None]]("steps.inject_fault")
    step_finished = _Of[Callable[[float], None]]("steps.finished")
