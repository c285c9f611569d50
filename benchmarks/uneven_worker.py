"""Runs one process of `uneven_devices`: every cut of a chain of equal layers, in turns.

The library cuts the chain three times: as for equal devices, by their speeds, and by speeds with a
limit of memory. Then ranks become slow, and the steps of all cuts are timed.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from timer import measure
from torch import Tensor, nn
from workers import Worker, place

import smp

MB = 1e6
_LIMITED = 0.9  # of what the fastest rank holds without a limit


class Pace(torch.autograd.Function):
    """Passes a tensor on after the time of a device of the rank's speed; backward takes twice."""

    seconds = 0.0
    """Seconds of a layer's forward on this rank."""
    late = 0.0
    """Seconds by which earlier waits were too long, which later ones make up for."""

    @staticmethod
    def wait(seconds: float) -> None:
        if seconds == 0:
            return
        started = time.perf_counter()
        time.sleep(max(0.0, seconds - Pace.late))
        Pace.late = max(0.0, Pace.late + time.perf_counter() - started - seconds)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Pace.wait(Pace.seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Pace.wait(2 * Pace.seconds)
        return grad


class Layer(nn.Module):
    """A residual block of two products, which the library does not cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(4 * width, width) / width**0.5)
        self.narrow = nn.Parameter(torch.randn(width, 4 * width) / (4 * width) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return Pace.apply(x + torch.tanh(x @ self.wide.T) @ self.narrow.T)


class Chain(nn.Module):
    """Equal layers; the loss is a mean."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def stepping(
    config: Mapping[str, Any], cut: tuple[int, ...] | None
) -> tuple[Any, Callable[[], Any]]:
    """A model that was partitioned by its first step, and that step.

    Args:
        cut: layers of each rank; None: the library decides.
    """
    torch.manual_seed(0)
    chain = Chain(config["num_layers"], config["width"])
    if cut is not None:
        ranks = [rank for rank, count in enumerate(cut) for _ in range(count)]
        place(chain, {f"layers.{idx}": rank for idx, rank in enumerate(ranks)})
    model = smp.DistributedModel(chain)
    # The first layer computes as much as the others: its input has a gradient, too.
    x = torch.randn(config["microbatches"] * config["rows"], config["width"]).requires_grad_()

    @smp.step
    def train_step(x: Tensor) -> None:
        model.backward(model(x))

    train_step(x)
    return model, lambda: train_step(x)


def cut_of(model: Any) -> tuple[int, ...]:
    """Layers of each rank. Collective."""
    names = [name for name, _ in model.local_named_modules() if name.count(".") == 1]
    return tuple(len(own) for own in smp.allgather(names, smp.PP_GROUP))


def decided(worker: Worker, keys: Mapping[str, Any]) -> tuple[tuple[int, ...], list[int]]:
    """The library's cut under a configuration, and bytes of each rank as it estimates them."""
    worker.start(keys)
    model, _ = stepping(worker.config, None)
    held = [rank.memory_bytes for rank in smp.explain_partition().ranks]
    cut = cut_of(model)
    smp.shutdown()
    return cut, held


def main() -> None:
    worker = Worker("uneven_devices")
    config = worker.config
    speeds, num_layers = config["speeds"], config["num_layers"]
    size = len(speeds)
    plain = {
        "pipeline_parallel_degree": size,
        "microbatches": config["microbatches"],
    }
    equal, _ = decided(worker, plain)
    keys = {**plain, "device_speeds": speeds}
    chosen, held = decided(worker, keys)
    limits = [2 * sum(held)] * size
    fastest = max(range(size), key=speeds.__getitem__)
    limits[fastest] = int(_LIMITED * held[fastest])
    limited, _ = decided(worker, {**keys, "partition_memory_limit": limits})

    cuts = [
        tuple(end - begin for begin, end in itertools.pairwise((0, *ends, num_layers)))
        for ends in itertools.combinations(range(1, num_layers), size - 1)
    ]
    worker.start(keys)
    steps = {}
    for cut in cuts:
        model, steps["-".join(map(str, cut))] = stepping(config, cut)
        if cut_of(model) != cut:
            raise RuntimeError(f"asked for {cut}, got {cut_of(model)}")
    if config["groups"]:
        (Path(config["groups"][smp.rank()]) / "cgroup.procs").write_text(str(os.getpid()))
    Pace.seconds = 1e-3 * config["layer_ms"] / speeds[smp.rank()]
    timings = measure(steps, worker.repeats, worker.warmup, smp.barrier)
    worker.emit(
        "cuts",
        {
            "median_ms": {name: 1e3 * timing.median_s for name, timing in timings.items()},
            "cpu_ms": smp.allgather(
                {name: 1e3 * timing.cpu.median_s for name, timing in timings.items()}, smp.WORLD
            ),
            "equal": equal,
            "chosen": chosen,
            "limited": limited,
            "held_mb": [num_bytes / MB for num_bytes in held],
            "limits_mb": [num_bytes / MB for num_bytes in limits],
        },
    )
    smp.shutdown()


if __name__ == "__main__":
    main()
