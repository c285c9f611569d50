"""Runs one process of `planning`: trains one model under several layouts, one after the other.

Rounds go over all layouts, so that a disturbance of the machine hits several of them. A layout is
given as the configuration of `smp.init`; all train the same samples, and the losses of the first
two steps go into the result, for the driver to compare.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from allocation_meter import AllocationMeter
from planning_model import make_batch, make_model
from timer import Timing
from torch import Tensor, distributed
from workers import Worker

import smp
from smp.planning.traced_model import repeated_layers

MB = 1e6


@dataclass
class Measured:
    """Measurements of one layout on this rank, over all rounds."""

    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of the first two steps, over all samples."""
    peak_bytes: int = 0
    """Above what the process held when it was about to make the model; without workspaces."""
    kept_bytes: int = 0
    """Of these, between steps."""
    workspace_bytes: int = 0
    """Of the library for matrix products, for each thread that ran microbatches."""


def training(case: dict[str, Any], samples: int) -> Callable[[], float]:
    """A step of the model under the configuration that was given to `smp.init`."""
    model = make_model(case["shape"])
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(model)
    model = smp.DistributedModel(model)
    if case["checkpoints"]:
        for layer in repeated_layers(model.get_module()):
            smp.set_activation_checkpointing(layer)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    ids = make_batch(case["shape"], samples).chunk(smp.rdp_size())[smp.rdp_rank()]

    @smp.step
    def train_step(ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids)["loss"]
        model.backward(loss)
        return loss.detach()

    def run() -> float:
        optimizer.zero_grad()
        loss = train_step(ids).reduce_mean()
        optimizer.step()
        return float(loss)

    return run


def over_ranks(loss: float) -> float:
    """The mean over all samples: each replica has as many."""
    total = torch.tensor(loss, dtype=torch.float64)
    distributed.all_reduce(total)
    return float(total) / smp.size()


def measure(case: dict[str, Any], samples: int, repeats: int, found: Measured) -> None:
    """Runs one round of one layout: a fresh start, two steps, then steps that are timed."""
    meter = AllocationMeter()
    before = meter.restart() - meter.workspace()
    run = training(case, samples)
    first = [over_ranks(run()) for _ in range(2)]
    found.losses = found.losses or first
    gc.collect()
    found.kept_bytes = meter.live() - meter.workspace() - before
    meter.restart()
    for _ in range(repeats):
        distributed.barrier()
        cpu_s, started_s = time.process_time(), time.perf_counter()
        run()
        distributed.barrier()
        found.step_s.append(time.perf_counter() - started_s)
        found.cpu_s.append(time.process_time() - cpu_s)
    found.workspace_bytes = meter.workspace()
    # Workspaces stay, so they were there at the peak.
    peak = meter.peak() - found.workspace_bytes - before
    found.peak_bytes = max(found.peak_bytes, peak)


def report(worker: Worker, case: dict[str, Any], found: Measured) -> None:
    """Collective. Bytes are by global rank, CPU seconds those of all ranks together."""
    everybody = smp.allgather(
        (
            smp.pp_rank(),
            found.peak_bytes,
            found.kept_bytes,
            found.workspace_bytes,
            statistics.median(found.cpu_s),
        ),
        smp.WORLD,
    )
    pp_ranks, peaks, kept, spaces, cpu_s = (list(each) for each in zip(*everybody, strict=True))
    values = {
        **Timing(tuple(found.step_s)).summary(),
        "cpu_s": sum(cpu_s),
        "losses": found.losses,
        "pp_ranks": pp_ranks,
        "peak_mb": [num_bytes / MB for num_bytes in peaks],
        "kept_mb": [num_bytes / MB for num_bytes in kept],
        "workspace_mb": [num_bytes / MB for num_bytes in spaces],
    }
    worker.emit(case["name"], values)


def main() -> None:
    worker = Worker("planning")
    cases, samples = worker.config["cases"], worker.config["samples"]
    shape, rounds = worker.config["shape"], worker.config["rounds"]
    everything = [Measured() for _ in cases]
    for number in range(1, rounds + 1):
        for case, found in zip(cases, everything, strict=True):
            worker.start(case["config"])
            measure({**case, "shape": shape}, samples, worker.repeats, found)
            if number == rounds:
                report(worker, case, found)
            smp.shutdown()
            # The first pass frees what C++ holds tensors with, and the second one those tensors.
            gc.collect()
            gc.collect()


if __name__ == "__main__":
    main()
