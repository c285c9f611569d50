"""Cost of calling a module that lives on another rank, without the module's own time.

The root calls one tiny module on partition 1 `few` or `many` times in a row; the slope of the step
time is the time per call. What the same module takes when it is called locally is subtracted.
"""

from __future__ import annotations

import time

import torch
from timer import Timing, measure
from torch import Tensor, distributed, nn
from workers import Worker, place

import smp
from smp.metrics import difference, server_stats

FEW_CALLS, MANY_CALLS = 20, 120


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Caller(nn.Module):
    """Calls `tiny` as often as the driver says."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Scale()
        self.tiny = Scale()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.num_calls):
            x = self.tiny(x)
        return x.sum()


def main() -> None:
    worker = Worker("remote_call")
    worker.start(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": 1,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    caller = Caller()
    place(caller, {"tiny": 1})
    model = smp.DistributedModel(caller)

    @smp.step
    def forward_step(x: Tensor) -> Tensor:
        return model(x)

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        loss = model(x)
        model.backward(loss)
        return loss

    with torch.no_grad():
        forward_step(torch.ones(1, 1))  # partitions
    for num_bytes in worker.config["payload_bytes"]:
        x = torch.ones(1, num_bytes // 4)
        for mode, run in (("forward", forward_step), ("forward_backward", train_step)):
            with torch.set_grad_enabled(run is train_step):
                report(worker, caller, run, mode, x)
    smp.shutdown()


def report(worker: Worker, caller: Caller, run: smp.StepFunction, mode: str, x: Tensor) -> None:
    def with_calls(num_calls: int) -> None:
        caller.num_calls = num_calls
        run(x)

    contenders = {
        "few": lambda: with_calls(FEW_CALLS),
        "many": lambda: with_calls(MANY_CALLS),
    }
    timings = measure(contenders, worker.repeats, worker.warmup, distributed.barrier)
    before = server_stats()
    with_calls(MANY_CALLS)
    sent = difference(server_stats(), before)
    num_calls = MANY_CALLS - FEW_CALLS
    pairs = zip(timings["many"].samples_s, timings["few"].samples_s, strict=True)
    own_s = local_call_s(mode, x)
    cost = Timing(tuple((many - few) / num_calls - own_s for many, few in pairs))
    worker.emit(
        f"{mode}_{x.numel() * 4}_bytes",
        {
            **cost.summary(scale=1e6, unit="us"),
            "module_us": own_s * 1e6,
            "messages_per_call": sent["messages_sent"] / MANY_CALLS,
            "bytes_per_call": sent["bytes_sent"] / MANY_CALLS,
        },
    )


def local_call_s(mode: str, x: Tensor, num_calls: int = 200) -> float:
    """Time of one call of the same module in this process."""
    caller = Caller()
    caller.num_calls = num_calls
    for _ in range(2):  # the first is warm-up
        started_s = time.perf_counter()
        loss = caller(x)
        if mode == "forward_backward":
            loss.backward()
        elapsed_s = time.perf_counter() - started_s
    return elapsed_s / num_calls


if __name__ == "__main__":
    main()
