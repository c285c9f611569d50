"""The process-wide object in a world of one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import smp
from smp.world import rendezvous, runtime
from smp.world.launch import Rendezvous, read_launch
from smp.world.observers import StepObserver

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SM_HP_MP_PARAMETERS", "SLURM_PROCID")


@pytest.fixture(autouse=True)
def single_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [*_LAUNCHER_VARIABLES, *(n for n in os.environ if n.startswith("OMPI_"))]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SMP_DEVICE", "cpu")
    yield
    smp.shutdown()


def test_world_of_one_starts_nothing() -> None:
    threads, files = os.listdir("/proc/self/task"), os.listdir("/proc/self/fd")
    smp.init({"microbatches": 2})
    assert os.listdir("/proc/self/task") == threads
    assert len(os.listdir("/proc/self/fd")) == len(files)
    assert not dist.is_initialized()
    rank = runtime.current().rank
    assert (rank.connections, rank.board, rank.mailbox, rank.exchange) == (None,) * 4
    assert (smp.size(), smp.rank(), smp.local_size(), smp.dp_size()) == (1, 0, 1, 1)
    assert rank.device == torch.device("cpu")


@pytest.mark.parametrize("has_pool", [True, False])
def test_large_tensors_have_memory_of_their_own_while_it_runs(
    has_pool: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMP_HOST_POOL", str(int(has_pool)))

    def grows() -> bool:
        before = runtime._C.host_memory_stats()["live_bytes"]
        large = torch.ones(2**20)
        return bool(runtime._C.host_memory_stats()["live_bytes"] - before == large.nbytes)

    assert not grows()
    smp.init()
    kept = torch.ones(2**20)
    assert grows() == has_pool
    smp.shutdown()
    assert not grows()
    assert kept.sum() == 2**20
    assert runtime._C.host_memory_stats()["cached_bytes"] == 0


def test_rank_prefix_lives_from_init_to_shutdown() -> None:
    smp.init()
    assert runtime.current().rank.prefix == "[global_rank 0 | pp 0 tp 0 rdp 0] "
    smp.shutdown()
    assert runtime._C.rank_prefix() == ""


def test_init_without_argument_reads_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"partitions": 1, "microbatches": 4}')
    smp.init()
    assert smp.state.cfg is not None
    assert smp.state.cfg.microbatches == 4


def test_state_follows_the_life_of_the_runtime() -> None:
    assert smp.state.cfg is None
    smp.init({"prescaled_batch": True})
    assert smp.state.cfg is not None
    assert (smp.state.cfg.prescaled_batch, smp.state.cfg.fp16) == (True, False)
    assert list(smp.state.module_manager.translate_functions) == []
    smp.shutdown()
    smp.shutdown()
    assert smp.state.cfg is None


def test_refused_config_leaves_nothing_behind() -> None:
    with pytest.raises(ValueError, match="microbatches=0"):
        smp.init({"microbatches": 0})
    assert not smp.is_initialized()
    smp.init({"microbatches": 1})


def test_private_keys_and_launcher_differences_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"microbatches": 4}')
    smp.init({"microbatches": 2, "_private": 1})
    text = caplog.text
    assert "microbatches=4 from the launcher replaces 2" in text
    assert "_private=1" in text


def test_later_init_merges_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    smp.init({"microbatches": 4})
    smp.init({"optimize": "speed"})
    cfg = smp.state.cfg
    assert cfg is not None
    assert (cfg.microbatches, cfg.optimize, cfg.memory_weight) == (4, "speed", 0.2)
    assert "optimize='speed'" in caplog.text
    with pytest.raises(ValueError, match="placement_strategy='spread'"):
        smp.init({"placement_strategy": "spread"})
    assert smp.state.cfg is cfg


def test_local_rank_before_init_is_that_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert smp.local_rank() == 0
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert smp.local_rank() == 1


def test_nested_steps_are_refused() -> None:
    smp.init()
    current = runtime.current()
    current.steps.begin("outer")
    with pytest.raises(RuntimeError, match="'inner' was called inside step 'outer'"):
        current.steps.begin("inner")
    assert current.steps.running == "outer"
    current.steps.running = None


def test_shutdown_inside_a_step_is_refused() -> None:
    smp.init({"microbatches": 2})
    calls = []

    @smp.step
    def step(x: torch.Tensor) -> None:
        calls.append(1)
        smp.shutdown()

    with pytest.raises(RuntimeError, match=r"smp.shutdown was called inside step '.*step'"):
        step(torch.ones(2))
    assert smp.is_initialized() and len(calls) == 1
    smp.shutdown()
    assert not smp.is_initialized()


def test_finished_steps_are_counted_and_announced() -> None:
    smp.init({"microbatches": 2})
    current, seen = runtime.current(), []

    class Seeing(StepObserver):
        def step_returned(self, duration_s: float, *, trains: bool, num_samples: int) -> None:
            seen.append((current.steps.num_finished, trains, num_samples, duration_s > 0))

    @smp.step
    def step(x: torch.Tensor) -> None:
        if x.sum() < 0:
            raise ValueError("negative")

    current.observers.add(Seeing())
    step(torch.ones(4))
    with pytest.raises(ValueError, match="negative"):
        step(-torch.ones(4))
    assert current.steps.running is None
    step(torch.ones(4))
    assert seen == [(1, True, 4, True), (2, True, 4, True)]


def test_shutdown_runs_every_callback_last_first_whatever_they_raise() -> None:
    smp.init()
    order: list[str] = []

    def failing() -> None:
        order.append("failing")
        raise KeyError("on purpose")

    runtime.current().on_shutdown(lambda: order.append("first"))
    runtime.current().on_shutdown(failing)
    runtime.current().on_shutdown(lambda: order.append("last"))
    with pytest.raises(KeyError):
        smp.shutdown()
    assert order == ["last", "failing", "first"]
    assert not smp.is_initialized()
    assert runtime._C.rank_prefix() == ""


def test_wrong_environment_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SMP_TIMEOUT_S", "never")
    with pytest.raises(ValueError, match="SMP_TIMEOUT_S"):
        smp.init()
    assert not smp.is_initialized()


# ---- meeting point -----------------------------------------------------------------


def test_private_folder_must_belong_to_this_user_alone(tmp_path: os.PathLike[str]) -> None:
    folder = os.path.join(tmp_path, "smp")
    rendezvous.make_private(folder)
    assert os.stat(folder).st_mode & 0o777 == 0o700
    rendezvous.make_private(folder)
    os.chmod(folder, 0o755)
    with pytest.raises(RuntimeError, match="0700"):
        rendezvous.make_private(folder)
    link = os.path.join(tmp_path, "link")
    os.chmod(folder, 0o700)
    os.symlink(folder, link)
    with pytest.raises(RuntimeError, match="0700"):
        rendezvous.make_private(link)


def test_each_init_has_keys_of_its_own() -> None:
    point = rendezvous.MeetingPoint()
    launch = read_launch({}, "here")
    first, second = (point.open(launch, {}, 5.0) for _ in range(2))
    first.set("key", "1")
    assert second.check(["key"]) is False


def test_unreachable_meeting_point_is_named() -> None:
    plan = Rendezvous("tcp", host="127.0.0.1", port=9, has_server=True)
    launch = read_launch({"RANK": "1", "WORLD_SIZE": "2"}, "here")
    with pytest.raises(RuntimeError, match="127.0.0.1:9"):
        rendezvous._connect(plan, launch, 0.5)


def test_machines_differ_by_boot_and_network() -> None:
    assert rendezvous.machine_id("a") == rendezvous.machine_id("b")  # names do not matter


def test_first_error_wins_and_names_its_ranks() -> None:
    rendezvous.raise_first_error([None, None])
    with pytest.raises(ValueError, match=r"^bad$"):
        rendezvous.raise_first_error(["bad", "bad"])
    with pytest.raises(ValueError, match=r"^bad \(on ranks \[1, 2\] of 4\)$"):
        rendezvous.raise_first_error([None, "bad", "bad", "worse"])
