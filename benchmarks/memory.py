"""Step time, CPU time and memory of sharding and checkpointing, next to PyTorch's own.

A step is forward, backward, reduction, clipping where the subject has it, and a fused AdamW. The
contenders of a subject take turns in the same processes, hence with the same allocator; they begin
with the same weights and see the same data, and their losses must agree, or the run fails.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch
from allocation_meter import AllocationMeter
from memory_contenders import SUBJECTS, Contender
from models import GptShape, make_batch
from timer import Timing, compare, measure
from torch import Tensor, distributed
from workers import Worker

import smp

MB = 1e6


def make_all(worker: Worker, meter: AllocationMeter) -> tuple[dict[str, Contender], dict[str, int]]:
    """Contenders, and the bytes that each keeps allocated after its first steps."""
    config = worker.config
    shape = GptShape(**config["shape"])
    batch = make_batch(shape, config["batch_size"], seed=1 + smp.rank())
    contenders: dict[str, Contender] = {}
    kept: dict[str, int] = {}
    losses: dict[str, list[Tensor]] = {}
    makers = SUBJECTS[config["subject"]][1]
    next(iter(makers.values()))(shape, batch).run()  # what a process allocates once counts for none
    for name, make in makers.items():
        gc.collect()
        before = meter.live()
        contenders[name] = make(shape, batch)
        losses[name] = [contenders[name].run() for _ in range(3)]
        kept[name] = meter.live() - before
    expected, *others = (torch.stack(values) for values in losses.values())
    for other in others:  # the third one has seen two updates
        torch.testing.assert_close(other, expected, rtol=1e-4, atol=0)
    return contenders, kept


def peak_bytes(contender: Contender, meter: AllocationMeter) -> int:
    """The most that a step allocates on top of what the contender keeps."""
    live = meter.restart()
    contender.run()
    return meter.peak() - live


def over_ranks(timing: Timing) -> list[float]:
    """CPU seconds of all ranks together, by repeat."""
    seconds = torch.tensor(timing.cpu_samples_s, dtype=torch.float64)
    if smp.size() > 1:
        distributed.all_reduce(seconds)
    return [float(value) for value in seconds]


def most_over_ranks(value: int) -> int:
    """Returns the largest value of all ranks."""
    tensor = torch.tensor(value)
    if smp.size() > 1:
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX)
    return int(tensor)


def main() -> None:
    worker = Worker("memory")
    configuration, _ = SUBJECTS[worker.config["subject"]]
    worker.start(configuration(worker.config["num_ranks"]))
    meter = AllocationMeter()
    contenders, kept = make_all(worker, meter)
    runs = {name: contender.run for name, contender in contenders.items()}
    meet = distributed.barrier if smp.size() > 1 else lambda: None
    timings = measure(runs, worker.repeats, worker.warmup, meet)
    emit(worker, contenders, timings, kept, meter)
    smp.shutdown()


def emit(
    worker: Worker,
    contenders: Mapping[str, Contender],
    timings: Mapping[str, Timing],
    kept: Mapping[str, int],
    meter: AllocationMeter,
) -> None:
    """Ratios are to the first contender in the same repeat; bytes are those of the fullest rank."""
    baseline = next(iter(timings))
    cpu = {name: Timing(tuple(over_ranks(timing))) for name, timing in timings.items()}
    state = {name: most_over_ranks(contenders[name].held().total) for name in timings}
    for name, timing in timings.items():
        held = contenders[name].held()
        peak = most_over_ranks(peak_bytes(contenders[name], meter))
        values = timing.summary()
        values["cpu_s"] = cpu[name].median_s
        if name != baseline:
            values |= compare(timing, timings[baseline])
            values["cpu_ratio_median"] = compare(cpu[name], cpu[baseline])["ratio_median"]
            values["state_ratio"] = state[name] / state[baseline]
        values |= {
            "parameters_mb": held.parameters / MB,
            "gradients_mb": held.gradients / MB,
            "optimizer_mb": held.optimizer / MB,
            "state_mb": state[name] / MB,
            "kept_mb": most_over_ranks(kept[name]) / MB,
            "step_peak_mb": peak / MB,
        }
        worker.emit(name, values)


if __name__ == "__main__":
    main()
