"""The way of a checkpoint's tensor through the Python code, seen by a profiler.

A *stay* is a function of the library that has the tensor in a local variable, by itself or in a
record, when it returns or yields, or that is on the stack when the core writes or reads the
tensor's bytes. Containers of many tensors do not count. A *return* is a change to a file that the
way has left before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from tests.dist.pool import Pool

_LAYERS = 4  # each rank has half of them, each of them has one parameter
_INSIDE = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")


@dataclass(frozen=True)
class Way:
    """The way of one tensor between a public function and its bytes.

    Attributes:
        stays: functions, as ``file:function``, in the order in which they are called.
        calls: calls of these functions up to the bytes.
    """

    stays: tuple[str, ...]
    calls: int

    @property
    def files(self) -> list[str]:
        return [stay.split(":")[0] for stay in self.stays]

    @property
    def returns(self) -> int:
        changes = sum(a != b for a, b in zip(self.files, self.files[1:], strict=False))
        return changes + 1 - len(set(self.files))


def has(value: object, address: int, depth: int = 2) -> bool:
    """Returns whether a value is the tensor at an address, or a record of it."""
    if type(value) in (Tensor, nn.Parameter):
        try:
            return value.data_ptr() == address  # type: ignore[attr-defined]
        except RuntimeError:  # a placeholder
            return False
    if depth == 0 or not is_dataclass(value):
        return False
    return any(has(item, address, depth - 1) for item in vars(value).values())


def way_of(function: Callable[[], object], tensor: Tensor, ends: str) -> Way:
    """Follows a tensor.

    Args:
        function: function that saves or loads.
        tensor: the tensor, the last one of this rank.
        ends: function of the core that writes or reads the bytes of a tensor.
    """
    import smp

    base = os.path.dirname(smp.__file__) + os.sep
    address = tensor.data_ptr()
    calls: list[str] = []
    stays: set[str] = set()
    num_calls = 0

    def name_of(frame: FrameType | None) -> str:
        while frame is not None and frame.f_code.co_name in _INSIDE:
            frame = frame.f_back
        if frame is None or not frame.f_code.co_filename.startswith(base):
            return ""
        return f"{frame.f_code.co_filename[len(base) :]}:{frame.f_code.co_qualname}"

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal num_calls
        if num_calls:
            return  # the tensor's bytes are there
        if event == "call" and frame.f_code.co_name not in _INSIDE:
            calls.append(name_of(frame))
        elif event == "return":
            if any(has(value, address) for value in frame.f_locals.values()):
                stays.add(name_of(frame))
        elif event == "c_call" and argument.__name__ == ends:
            if not any(has(value, address) for value in frame.f_locals.values()):
                return  # another tensor
            num_calls = len(calls)
            inner: FrameType | None = frame
            while inner is not None:
                stays.add(name_of(inner))
                inner = inner.f_back

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    own = [call for call in calls[:num_calls] if call and call in stays]
    return Way(tuple(dict.fromkeys(own)), len(own))


def ways(rank: int, folder: str) -> dict[str, Way]:
    import smp

    smp.init({"pipeline_parallel_degree": 2, "auto_partition": False, "ddp": True})
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(_LAYERS)))
    for layer in net[_LAYERS // 2 :]:
        smp.set_partition(layer, 1)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))

    @smp.step
    def step(x: Tensor) -> None:
        model.backward(model(x).square().mean())

    step(torch.randn(4, 8))
    optimizer.step()
    last = net[_LAYERS // 2 - 1 if rank == 0 else -1]
    assert isinstance(last, nn.Linear)
    moment = optimizer.state[last.weight]["exp_avg"]

    def save(partial: bool = True) -> None:
        smp.save_checkpoint(folder, f"{partial}", partial, model, optimizer if partial else None)

    def load() -> None:
        smp.resume_from_checkpoint(folder, "True")

    save()  # what only the first save does is over

    def save_model() -> None:
        smp.save_checkpoint(folder, "model", model=model)

    found = {
        "partial, the model alone": way_of(save_model, last.weight, "append_tensor"),
        "partial, a parameter": way_of(save, last.weight, "append_tensor"),
        "partial, a moment": way_of(save, moment, "append_tensor"),
        "full": way_of(lambda: save(False), last.weight, "append_tensor"),
        "load": way_of(load, last.weight, "read_slice"),
    }
    if rank != 0:
        del found["full"]  # the first rank writes
    return found


@dataclass(frozen=True)
class Limit:
    """The longest permitted way of a tensor."""

    stays: int
    files: int
    returns: int


#: lowered with each change that shortens the way
LIMITS = {
    "partial, the model alone": Limit(stays=16, files=9, returns=1),
    "partial, a parameter": Limit(stays=20, files=10, returns=2),
    "partial, a moment": Limit(stays=11, files=6, returns=1),
    "full": Limit(stays=16, files=9, returns=3),
    "load": Limit(stays=12, files=7, returns=2),
}


def test_a_tensor_stays_in_no_more_functions_than_before(pool: Pool, tmp_path: Path) -> None:
    seen = set()
    for found in pool.run(2, ways, str(tmp_path)):
        for kind, way in found.items():
            text = f"{kind}: {len(way.stays)} stays in {len(set(way.files))} files"
            print(f"{text}, {way.returns} returns, {way.calls} calls", *way.stays, sep="\n  ")
            limit = LIMITS[kind]
            assert len(way.stays) <= limit.stays
            assert len(set(way.files)) <= limit.files
            assert way.returns <= limit.returns
            assert way.stays[0].startswith("checkpoint/"), "the way begins in a public function"
            assert len(way.stays) > 5, "the profiler saw nothing"
            seen.add(kind)
    assert seen == LIMITS.keys()
