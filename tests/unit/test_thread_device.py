"""Threads work on the device of their rank. The devices are CUDA's by name only: what would set
them is recorded."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import smp
import smp._C as _C
from smp.checkpoint.handle import SaveHandle
from smp.nn import attend
from smp.tensor_parallel import regions
from smp.world import runtime, thread_device
from smp.world.connections import Connections

_SECOND = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def single_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SM_HP_MP_PARAMETERS", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("OMPI_")]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SMP_DEVICE", "cpu")
    yield
    smp.shutdown()


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Name of the thread and device of each call of `torch.cuda.set_device`."""
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: calls.append((threading.current_thread().name, device)),
    )
    return calls


def test_init_sets_the_device_of_its_thread(
    entered: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "look_at_devices", lambda settings: ("cuda", 2))
    smp.init()
    assert entered == [("MainThread", torch.device("cuda", 0))]
    assert runtime.current().rank.device == torch.device("cuda", 0)


def test_init_on_the_cpu_sets_none(entered: list[tuple[str, Any]]) -> None:
    smp.init()
    assert entered == []


def test_bodies_of_a_step_run_on_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        places.append(device)
        yield
        places.pop()

    monkeypatch.setattr(thread_device, "on", on)
    smp.init({"microbatches": 2})
    model = smp.DistributedModel(torch.nn.Linear(2, 2))
    seen = []

    @smp.step
    def step(x: torch.Tensor) -> None:
        seen.append(list(places))
        model.backward(model(x).sum())

    step(torch.ones(4, 2))
    assert seen == [[torch.device("cpu")]] * 2
    assert places == []


def test_the_thread_that_saves_enters_the_device_first(entered: list[tuple[str, Any]]) -> None:
    order: list[object] = []

    def work(progress: object) -> None:
        order.extend(entered)
        order.append("work")

    SaveHandle(work, 0, lambda: None, 0.0, lambda: 0.0, _SECOND).wait()
    assert order == [("smp-save", _SECOND), "work"]


def test_a_device_is_entered_for_a_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: ("block on", device))
    assert thread_device.on(_SECOND) == ("block on", _SECOND)
    with thread_device.on(torch.device("cpu")):
        pass


def test_what_the_device_gets_done_counts_on_the_board_of_the_rank() -> None:
    counted = []

    class Meter:
        def count_on(self, board: _C.FaultBoard) -> None:
            counted.append(board)

    meter: Any = Meter()
    connections = Connections(0, ["pp 0", "pp 1"], 10.0, 0.0, False, torch.device("cpu"), meter)
    assert counted == [connections.board]


def test_dropout_seeds_the_generator_that_it_puts_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds and restores the generator of the tensor's device, not of the thread's current one."""
    calls: list[tuple[str, str]] = []

    class State:
        @staticmethod
        def capture(device: str) -> State:
            calls.append(("capture", device))
            return State()

        def restore(self) -> None:
            calls.append(("restore", ""))

    monkeypatch.setattr(_C, "RandomState", State)
    monkeypatch.setattr(_C, "seed_generators", lambda seed, device: calls.append(("seed", device)))
    monkeypatch.setattr(regions, "own_seed", lambda: 7)
    with attend._drawing(0.5, _SECOND):
        assert calls == [("capture", "cuda:1"), ("seed", "cuda:1")]
    assert calls[2:] == [("restore", "")]


def test_dropout_draws_a_new_seed_each_time_and_leaves_no_trace() -> None:
    smp.init()
    cpu = torch.device("cpu")
    drawn, after = [], []
    torch.manual_seed(3)
    for _ in range(2):
        with attend._drawing(0.5, cpu):
            drawn.append(torch.rand(3))
            torch.rand(100)
        after.append(torch.rand(3))
    assert not torch.equal(drawn[0], drawn[1])
    torch.manual_seed(3)
    for expected in after:
        regions.own_seed()
        assert torch.equal(torch.rand(3), expected)
