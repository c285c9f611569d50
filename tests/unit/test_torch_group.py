"""A process's place as a group of torch, or a worker of Ray Train, gives it. Ray is a stand-in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

import smp
from smp._torch_releases import tcp_store
from smp.world.launch import Rendezvous
from smp.world.torch_group import place_of, read_torch_group


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    yield
    smp.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def test_without_a_group_there_is_none() -> None:
    assert read_torch_group({}) is None


def test_a_group_tells_where_it_has_met(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    group = read_torch_group({"TORCHELASTIC_RESTART_COUNT": "3"})
    assert group is not None
    assert (group.rank, group.size, group.store) == (0, 1, "FileStore")
    assert group.place == Rendezvous("file", path=f"{tmp_path}/meet", attempt="3")


def test_a_store_of_tcp_is_a_place() -> None:
    store = tcp_store("127.0.0.1", 0, 1, is_master=True)
    place = Rendezvous("tcp", host="127.0.0.1", port=store.port, has_server=True)
    assert place_of(store, "0") == place


def test_a_store_of_one_process_is_no_place() -> None:
    assert place_of(dist.HashStore(), "0") is None


# ---- workers of Ray Train ----------------------------------------------------------------


@dataclass
class Context:
    """A context such as `ray.train.get_context()` returns."""

    size: int | None

    def get_world_rank(self) -> int:
        return self.get_world_size() - 1

    def get_world_size(self) -> int:
        if self.size is None:
            raise RuntimeError("not in a worker")
        return self.size


def pretend(monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    train = ModuleType("ray.train")
    train.get_context = lambda: Context(size)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray.train", train)


def test_a_worker_that_knows_no_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 2)
    with pytest.raises(ValueError, match="worker 1 of 2 of Ray Train, .*TorchTrainer"):
        smp.init()
    assert not smp.is_initialized()


@pytest.mark.parametrize("size", [1, None])
def test_a_single_worker_and_a_driver_are_single_processes(
    monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    pretend(monkeypatch, size)
    smp.init()
    assert smp.size() == 1
