"""Settings that NCCL receives. Its process groups need GPUs; their options do not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from smp import data_parallel
from smp.world import nccl

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def test_communicators_start_in_one_order_unless_the_user_decides() -> None:
    environ: dict[str, str] = {}
    nccl.set_launch_order(environ)
    assert environ == {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    environ = {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}
    nccl.set_launch_order(environ)
    assert environ == {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}


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
