"""Memory of the late device: owners, reuse, and what is in it."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

from tests.device.checks.held import Held


def test_new_memory_is_nan() -> None:
    assert torch.isnan(torch.empty(1000, device="late")).all()
    assert torch.empty(3, dtype=torch.long, device="late").tolist() == [-1, -1, -1]


def test_a_stream_reuses_its_memory_at_once(held: Held) -> None:
    with torch.late.stream(held.stream):
        x = torch.zeros(1000, device="late")
        address = x.data_ptr()
        y = x + 1  # queued before the memory is filled
        del x
        z = torch.empty(1000, device="late")
        assert z.data_ptr() == address
    with torch.late.stream(torch.late.Stream()):
        assert torch.empty(1000, device="late").data_ptr() != address, "another stream's"
    held.release()
    assert (y == 1).all()
    assert torch.isnan(z).all()


def used_elsewhere(held: Held, tells_allocator: bool) -> torch.Tensor:
    """Frees a tensor that a held stream has yet to read, and returns what it reads."""
    x = torch.ones(1000, device="late")
    torch.late.current_stream().synchronize()
    with torch.late.stream(held.stream):
        y = x + 1
    if tells_allocator:
        x.record_stream(held.stream)
    del x
    torch.empty(1000, device="late").fill_(5)
    torch.late.current_stream().synchronize()
    held.release()
    return y


def test_a_missing_record_stream_is_seen(held: Held) -> None:
    assert not (used_elsewhere(held, tells_allocator=False) == 2).any()


def test_record_stream_keeps_memory_until_the_stream_has_passed(held: Held) -> None:
    assert (used_elsewhere(held, tells_allocator=True) == 2).all()


def test_memory_with_a_recorded_stream_comes_back(held: Held) -> None:
    x = torch.ones(1000, device="late")
    address = x.data_ptr()
    x.record_stream(held.stream)
    del x
    first = torch.empty(1000, device="late")
    assert first.data_ptr() != address
    held.release()
    second = torch.empty(1000, device="late")
    assert second.data_ptr() == address
    assert torch.isnan(second).all()


def test_statistics() -> None:
    gc.collect()
    before = torch.late.memory_allocated()
    torch.late.reset_peak_memory_stats()
    x = torch.empty(1 << 20, dtype=torch.uint8, device="late")
    assert torch.late.memory_allocated() - before == 1 << 20
    del x
    assert torch.late.memory_allocated() == before
    assert torch.late.max_memory_allocated() - before == 1 << 20
    assert torch.late.memory_reserved() >= before + (1 << 20)
    torch.late.empty_cache()
    assert torch.late.memory_reserved() == before
    free, total = torch.late.mem_get_info()
    assert total - free == before
    assert torch.late.get_device_properties("late:1").total_memory == total


def test_released_memory_is_joined_and_used_again() -> None:
    torch.late.empty_cache()
    before = torch.late.memory_reserved()
    parts = [torch.ones(1 << 18, device="late") for _ in range(4)]
    first = min(part.data_ptr() for part in parts)
    parts.clear()
    torch.late.empty_cache()
    whole = torch.empty(1 << 20, device="late")
    assert whole.data_ptr() == first
    assert torch.late.memory_reserved() - before == 4 << 20
    assert torch.isnan(whole).all()


def test_too_much_memory_is_an_error() -> None:
    total = torch.late.get_device_properties().total_memory
    with pytest.raises(torch.OutOfMemoryError, match="late device out of memory"):
        torch.empty(total + 1, dtype=torch.uint8, device="late")
    x = torch.empty(total * 3 // 4, dtype=torch.uint8, device="late:1")
    del x  # freed blocks are no reason for the error
    torch.empty(total * 7 // 8, dtype=torch.uint8, device="late:1")
    torch.late.empty_cache()


def test_memory_belongs_to_the_current_device() -> None:
    with torch.late.device(2):
        x = torch.ones(3, device="late")
    assert x.device == torch.device("late:2")
    assert torch.late.memory_allocated(2) == 512
    assert (x + 1).device == x.device


def test_a_host_that_touches_device_memory_ends_with_the_reason() -> None:
    program = """
import ctypes, torch, tests.device
def touches(x):
    return ctypes.c_float.from_address(x.data_ptr()).value
touches(torch.ones(3, device="late:1"))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == -11
    assert "the host touched 0x" in ended.stderr
    assert "memory of late:1" in ended.stderr
    assert "in touches" in ended.stderr, "the Python stack"
