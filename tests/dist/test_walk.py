"""The ways of a step and of a configuration key through the Python code, seen by a profiler."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from tests.dist.pool import Pool


@dataclass(frozen=True)
class Walk:
    """Python calls inside of the library.

    Attributes:
        calls: number of calls.
        files: number of files with a function that was called.
        room_changes: number of calls in another room than the call before.
    """

    calls: int
    files: int
    room_changes: int


def calls_of(function: Callable[[], object]) -> list[tuple[str, str]]:
    """File and name of each function of the library that is called in this thread."""
    import smp

    base = os.path.dirname(smp.__file__) + os.sep
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(base):
            calls.append((path[len(base) :], frame.f_code.co_name))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def walk_of(function: Callable[[], object]) -> Walk:
    files = [file for file, _ in calls_of(function)]
    rooms = [file.split(os.sep)[0] for file in files]
    changes = sum(a != b for a, b in zip(rooms, rooms[1:], strict=False))
    return Walk(len(files), len(set(files)), changes)


def walk(rank: int) -> dict[str, Walk]:
    import smp

    config = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}
    smp.init({**config, "auto_partition": False})
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))  # calls grow with parameters
    smp.set_partition(net[1], 1)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    x = torch.randn(4, 8)
    for _ in range(64):  # checks of first steps are over then
        optimizer.zero_grad()
        step(x)
        optimizer.step()
    return {"step": walk_of(lambda: step(x)), "optimizer.step": walk_of(optimizer.step)}


#: the most that a step of a pipeline may take; lowered with each change that shortens the way
LIMITS = {"step": Walk(67, 26, 15), "optimizer.step": Walk(32, 12, 21)}


def test_a_step_takes_no_more_calls_than_before(pool: Pool) -> None:
    for walks in pool.run(2, walk):
        print(walks)
        for name, limit in LIMITS.items():
            assert walks[name].calls <= limit.calls
            assert walks[name].files <= limit.files
            assert walks[name].room_changes <= limit.room_changes
            assert walks[name].calls > 20, "the profiler saw nothing"


def stays_of_a_key(rank: int) -> list[str]:
    """Functions of `smp.config` that `smp.init` calls until the configuration is frozen."""
    import smp

    calls = calls_of(lambda: smp.init({"pipeline_parallel_degree": 1}))
    names = [name for file, name in calls if file.split(os.sep)[0] == "config"]
    return names[: names.index("check_world")]  # the first function that gets the frozen table


def test_a_configuration_key_makes_few_stays(pool: Pool) -> None:
    (stays,) = pool.run(1, stays_of_a_key)
    assert {"read_config", "normalize", "of_checked"} <= set(stays)
    assert len(stays) <= 8, stays
