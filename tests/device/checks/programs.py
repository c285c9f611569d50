"""Functions that ranks of `check_collectives.py` run."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tests.device as late
from tests.device.checks.held import Held


def full(value: float, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(value), device="late")


def numbers(rank: int) -> None:
    """Asserts the results of all operations, with pauses of the streams."""
    late.set_delays(rank + 1, 1000)
    x = full(rank + 1)
    dist.all_reduce(x)
    assert x.tolist() == [3] * 4
    x = full(rank + 1)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.tolist() == [1.5] * 4
    x = full(rank)
    dist.broadcast(x, 1)
    assert x.tolist() == [1] * 4
    dist.reduce(x, 0, dist.ReduceOp.AVG)
    assert rank != 0 or x.tolist() == [1] * 4
    parts = [full(9), full(9)]
    dist.all_gather(parts, full(rank))
    assert [part[0].item() for part in parts] == [0, 1]
    whole = full(9, 8)
    dist.all_gather_into_tensor(whole, full(rank))
    assert whole.tolist() == [0] * 4 + [1] * 4
    given, half = whole + rank, full(9)
    dist.reduce_scatter_tensor(half, given)
    assert half.tolist() == [1 + 2 * rank] * 4
    assert given.equal(whole + rank), "the input is left alone"
    dist.reduce_scatter_tensor(half, given, dist.ReduceOp.AVG)
    assert half.tolist() == [0.5 + rank] * 4
    dist.all_to_all_single(half, full(rank))
    assert half.tolist() == [0, 0, 1, 1]
    dist.scatter(half, [full(5), full(6)] if rank == 0 else None)
    assert half.tolist() == [5 + rank] * 4
    dist.gather(half, parts if rank == 0 else None)
    assert rank != 0 or [part[0].item() for part in parts] == [5, 6]
    if rank == 0:
        dist.send(full(7), 1)
    else:
        dist.recv(half, 0)
        assert half.tolist() == [7] * 4
    dist.barrier()
    on_host = torch.ones(2)
    dist.all_reduce(on_host)
    assert on_host.tolist() == [2, 2]


def order(rank: int) -> None:
    """Asserts that `wait` orders the stream, does not wait, and is needed."""
    held = Held(torch.late.Stream())
    with torch.late.stream(held.stream):
        x = full(rank + 1)
        work = dist.all_reduce(x, async_op=True)
        assert not work.is_completed()
        work.wait()
        y = x * 2
        assert not work.is_completed(), "the host went on"
    held.release()
    assert work.is_completed() and work.is_success()
    assert y.tolist() == [6] * 4
    # The peer's stream is held back: whoever does not wait has the sum too early.
    x = full(rank + 1)
    torch.late.current_stream().synchronize()
    held = Held(torch.late.Stream())
    with torch.late.stream(held.stream):
        work = dist.all_reduce(x, async_op=True)
    early = x * 2
    assert early.tolist() == [2 * rank + 2] * 4
    held.release()
    work.wait()
    assert (x * 2).tolist() == [6] * 4
    assert work.get_future().wait()[0] is x or work.get_future().value()[0].tolist() == [3] * 4


def kept(rank: int) -> None:
    """Asserts that tensors are kept until `wait`, which an early one on another stream ends."""

    def gather(waits_elsewhere: bool) -> torch.Tensor:
        # Only this stream is held back, on both ranks.
        held = Held(torch.late.Stream())
        whole, part = full(0, 2000), full(rank + 1, 1000)
        torch.late.current_stream().synchronize()
        held.stream.wait_stream(torch.late.current_stream())
        with torch.late.stream(held.stream):
            work = dist.all_gather_into_tensor(whole, part, async_op=True)
        if waits_elsewhere:
            with torch.late.stream(torch.late.Stream()):
                work.wait()
        del part  # belongs to the current stream, which goes on
        again = full(7, 1000)
        again.add_(0)
        torch.late.current_stream().synchronize()
        held.release()
        work.wait()
        torch.late.synchronize()
        return whole

    assert gather(waits_elsewhere=False).tolist() == [1] * 1000 + [2] * 1000
    assert gather(waits_elsewhere=True).tolist() != [1] * 1000 + [2] * 1000


def synchronous(rank: int) -> None:
    """Asserts that a synchronous operation runs on the caller's stream."""
    held = Held(torch.late.Stream())
    threads: list[str] = []
    with torch.late.stream(held.stream):
        x = full(rank + 1)
        dist.all_reduce(x)  # the host does not wait here either
        late.enqueue(held.stream, lambda: threads.append(threading.current_thread().name))
        assert threads == []
    held.release()
    assert x.tolist() == [3] * 4
    assert len(threads) == 1


def data_parallel(rank: int) -> None:
    """Asserts that DistributedDataParallel has the gradients of both ranks."""
    late.set_delays(rank + 3, 500)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.GELU(), torch.nn.Linear(5, 1))
    inputs = torch.randn(2, 4, 3)
    expected = []
    for part in inputs:
        model.zero_grad()
        model(part).sum().backward()
        expected.append([parameter.grad.clone() for parameter in model.parameters()])
    model.zero_grad()
    parallel = DistributedDataParallel(model.to("late"))
    parallel(inputs[rank].to("late")).sum().backward()
    for parameter, a, b in zip(model.parameters(), *expected, strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), (a + b) / 2)


def abort(rank: int) -> None:
    """Asserts that `abort` ends an operation whose peer never comes, with an error."""
    group = dist.distributed_c10d._get_default_group()._get_backend(torch.device("late"))
    if rank == 0:
        work = dist.all_reduce(full(1), async_op=True)
        assert not work.is_completed()
        group.abort()
        with pytest.raises(RuntimeError, match="was aborted"):
            torch.late.synchronize()
        assert not work.is_success()
        assert "was aborted" in late.take_error()
    dist.all_reduce(torch.zeros(1))  # over the group of the CPU: no rank leaves before
