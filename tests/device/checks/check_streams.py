"""Streams, events, copies and errors of the late device."""

from __future__ import annotations

import threading

import pytest
import torch

import tests.device as late
from tests.device.checks.held import Held


def test_a_missing_wait_between_streams_is_seen(held: Held) -> None:
    with torch.late.stream(held.stream):
        x = torch.ones(10, device="late")
    y = x + 1
    torch.late.current_stream().synchronize()
    assert not (y == 2).any()


@pytest.mark.parametrize("by", ["event", "stream"])
def test_a_wait_orders_streams(held: Held, by: str) -> None:
    with torch.late.stream(held.stream):
        x = torch.ones(10, device="late")
    if by == "stream":
        torch.late.current_stream().wait_stream(held.stream)
    else:
        torch.late.current_stream().wait_event(held.stream.record_event())
    y = x + 1
    held.release()
    assert (y == 2).all()


def test_a_wait_binds_to_the_last_record(held: Held) -> None:
    free = torch.late.Stream()
    waiting = torch.late.Stream()
    event = torch.late.Event()
    event.record(free)
    waiting.wait_event(event)
    event.record(held.stream)  # too late for that wait
    waiting.synchronize()
    assert not event.query()
    waiting.wait_event(event)
    assert not waiting.query()
    held.release()
    waiting.synchronize()
    assert event.query()


def test_an_event_that_was_never_recorded_has_fired() -> None:
    event = torch.late.Event()
    assert event.query()
    event.synchronize()
    torch.late.current_stream().wait_event(event)
    torch.late.synchronize()


def test_events_measure_time(held: Held) -> None:
    first, second = (torch.late.Event(enable_timing=True) for _ in range(2))
    first.record(held.stream)
    second.record(held.stream)
    with pytest.raises(RuntimeError, match="must be completed"):
        first.elapsed_time(second)
    held.release()
    assert first.elapsed_time(second) >= 0


def test_the_module_is_that_of_the_device() -> None:
    assert torch.get_device_module("late") is torch.late
    assert torch.late.is_available() and torch.late.is_initialized()
    assert torch.accelerator.current_accelerator() == torch.device("late")
    before = torch.late.current_stream()
    stream = torch.late.Stream()
    assert isinstance(stream, torch.late.Stream)
    with torch.late.stream(stream):
        assert torch.late.current_stream() == stream
        with torch.late.stream(None):
            assert torch.late.current_stream() == stream
    assert torch.late.current_stream() == before == torch.late.default_stream()
    with torch.late.device("late:3"):
        assert torch.late.current_device() == 3
        assert torch.late.Stream().device == torch.device("late:3")
    assert torch.late.current_device() == 0
    with pytest.raises(RuntimeError, match="no device 99 of 8"):
        torch.late.set_device(99)


def test_each_thread_has_its_own_device_and_stream() -> None:
    torch.late.set_device(1)
    torch.late.set_stream(torch.late.Stream())
    found = []
    thread = threading.Thread(
        target=lambda: found.append(
            (torch.late.current_device(), torch.late.current_stream().stream_id)
        )
    )
    thread.start()
    thread.join()
    assert found == [(0, 0)]
    torch.late.set_stream(torch.late.default_stream())


def test_backward_runs_on_the_stream_of_forward() -> None:
    """The engine's thread has the device, and its streams are ordered with the caller's."""
    late.set_delays(7, 1000)
    x = torch.ones(4, device="late:1", requires_grad=True)
    side = torch.late.Stream("late:1")
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.append((torch.late.current_device(), torch.late.current_stream().stream_id))
            return gradient * 2

    side.wait_stream(torch.late.current_stream("late:1"))
    with torch.late.stream(side):
        y = Look.apply(x)
    torch.late.current_stream("late:1").wait_stream(side)
    y.sum().backward()
    assert x.grad.tolist() == [2, 2, 2, 2]
    assert seen == [(1, side.stream_id)]


# -------------------------------------------------------------------- copies


def test_a_copy_to_pinned_memory_is_late(held: Held) -> None:
    x = torch.ones(3, device="late")
    torch.late.current_stream().synchronize()
    host = torch.empty(3, pin_memory=True)
    assert host.is_pinned() and host[1:].is_pinned() and not torch.empty(3).is_pinned()
    with torch.late.stream(held.stream):
        host.copy_(x, non_blocking=True)
    assert torch.isnan(host).all(), "a host that reads without a wait"
    held.release()
    assert host.tolist() == [1, 1, 1]


def test_a_copy_from_pinned_memory_is_late(held: Held) -> None:
    pinned = torch.ones(3).pin_memory()
    with torch.late.stream(held.stream):
        x = pinned.to("late", non_blocking=True)
    pinned.fill_(7)  # a fault: the copy has not begun
    held.release()
    assert x.tolist() == [7, 7, 7]


def test_pinned_memory_is_kept_for_copies(held: Held) -> None:
    with torch.late.stream(held.stream):
        x = torch.ones(3).pin_memory().to("late", non_blocking=True)
    torch.empty(3, pin_memory=True).fill_(5)
    held.release()
    assert x.tolist() == [1, 1, 1]


def test_a_copy_from_pageable_memory_takes_its_source_at_once(held: Held) -> None:
    source = torch.ones(3)
    with torch.late.stream(held.stream):
        x = source.to("late", non_blocking=True)
    source.fill_(7)
    held.release()
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_copy_to_pageable_memory_drains(non_blocking: bool) -> None:
    late.set_delays(3, 3000)
    x = torch.zeros(3, device="late")
    for _ in range(20):
        x += 1
    assert x.to("cpu", non_blocking=non_blocking).tolist() == [20, 20, 20]


def test_copies_between_devices_are_ordered_with_both_streams() -> None:
    late.set_delays(9, 2000)
    for _ in range(5):
        x = torch.zeros(3, device="late:1")
        for _ in range(4):
            x += 1
        y = x.to("late:2") * 2
        assert y.tolist() == [8, 8, 8]


# -------------------------------------------------------- functions and errors


def test_a_function_of_the_host_runs_in_order(held: Held) -> None:
    done: list[str] = []
    late.enqueue(held.stream, lambda: done.append(threading.current_thread().name))
    assert done == []
    held.release()
    assert len(done) == 1


def test_errors_are_found_at_the_next_wait_and_kept() -> None:
    x = torch.ones(3, device="late")
    x[torch.full((1,), 9, device="late")]
    with pytest.raises(RuntimeError, match="queued earlier failed: index 9 is out of bounds"):
        torch.late.synchronize()
    with pytest.raises(RuntimeError, match="queued earlier failed"):
        x + 1
    assert "out of bounds" in late.take_error()
    assert x.tolist() == [1, 1, 1]


def test_errors_of_functions_of_the_host_are_found() -> None:
    def fail() -> None:
        raise ValueError("no such thing")

    late.enqueue(torch.late.current_stream(), fail)
    with pytest.raises(RuntimeError, match="ValueError: no such thing"):
        torch.late.synchronize()


def test_pauses_are_checked() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        late.set_delays(1, -1)
