"""Settings that NCCL receives. Its process groups need GPUs; their options do not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from smp import _C, data_parallel
from smp.world import groups, nccl

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def _no_cpu(name: str, ranks: Sequence[int]) -> _C.Communicator:
    raise AssertionError(name)


_DEFAULTS = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def test_communicators_start_in_one_order_and_end_by_our_watch() -> None:
    environ: dict[str, str] = {}
    nccl.set_defaults(environ)
    assert environ == _DEFAULTS


def test_variables_that_the_user_has_set_stay() -> None:
    environ = {"NCCL_LAUNCH_ORDER_IMPLICIT": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    nccl.set_defaults(environ)
    assert environ == {"NCCL_LAUNCH_ORDER_IMPLICIT": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    former = {"NCCL_ASYNC_ERROR_HANDLING": "1"}
    nccl.set_defaults(former)
    assert former == {"NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")
def test_defaults_are_set_before_a_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str | None]] = []

    class Backend:
        def __init__(self, *arguments: Any) -> None:
            seen.append({name: os.environ.get(name) for name in _DEFAULTS})

    made: list[tuple[Any, ...]] = []
    for name in _DEFAULTS:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend)
    monkeypatch.setattr(nccl, "group_options", lambda *arguments: None)
    monkeypatch.setattr(_C, "make_c10d_communicator", lambda *arguments: made.append(arguments))
    store = dist.HashStore()
    groups.make_on_device(torch.device("cuda", 1), store, _no_cpu, "dp", [0, 1], 0, 1.0)
    groups.make_channel("cuda:1", store, 0, 1, 0, 0, 1.0)
    assert seen == [_DEFAULTS, _DEFAULTS]
    assert [device for _, _, device, _ in made] == ["cuda:1", "cuda:1"]


def test_a_device_gets_all_hardware_queues_unless_the_user_decides() -> None:
    environ: dict[str, str] = {}
    nccl.set_device_queues(environ, is_cuda_in_use=False)
    assert environ == {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    environ = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    nccl.set_device_queues(environ, is_cuda_in_use=False)
    assert environ == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@pytest.mark.parametrize(("given", "warns"), [(None, "8"), ("1", "1"), ("32", "")])
def test_a_script_that_uses_cuda_before_init_is_warned(
    given: str | None, warns: str, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {} if given is None else {"CUDA_DEVICE_MAX_CONNECTIONS": given}
    before = dict(environ)
    nccl.set_device_queues(environ, is_cuda_in_use=True)
    assert environ == before
    if warns:
        assert f"with {warns} hardware queues" in caplog.text
    else:
        assert not caplog.records


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")
def test_collectives_run_on_streams_of_high_priority() -> None:
    options = nccl.group_options(12.0)
    assert options.is_high_priority_stream
    assert options._timeout.total_seconds() == 12.0


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")
def test_a_way_takes_few_blocks_of_a_device() -> None:
    options = nccl.group_options(12.0, nccl.CHANNEL_CTAS)
    assert options.is_high_priority_stream
    if hasattr(options, "config"):
        assert options.config.max_ctas == nccl.CHANNEL_CTAS
        assert nccl.group_options(12.0).config.max_ctas != nccl.CHANNEL_CTAS


def test_buckets_suit_the_device_unless_a_size_is_given() -> None:
    default = data_parallel.DEFAULT_MB
    assert default == 25
    assert data_parallel.bucket_cap_bytes(default, CPU) == 25 << 20
    assert data_parallel.bucket_cap_bytes(default, CUDA) == 128 << 20
    assert data_parallel.bucket_cap_bytes(25, CUDA) == 25 << 20
    assert data_parallel.bucket_cap_bytes(0.5, CUDA) == 1 << 19
