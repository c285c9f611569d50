"""A rank that measures what parts of a step take on CPU cores: started by `calibration.py`."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import smp
import smp._C as _C
from smp.data_parallel import DEFAULT_MB, bucket_cap_bytes
from smp.planning import hardware
from smp.planning.hardware import Hardware
from smp.planning.layout import Layout
from smp.planning.run_cuts import View
from smp.planning.search import Job, predict
from smp.world import runtime

_PRODUCT_WIDTH = 768
_MOVED_BYTES = 256 << 20
_WINDOW_S = 0.4  # of one measurement, the same on all ranks
_FEWEST = 3
_SHARED_CORES = 2  # of a pipeline with as many ranks, and with twice as many
_WIDTH, _HEADS, _TOKENS, _TABLE = 512, 8, 128, 4096
_FEW_LAYERS, _MANY_LAYERS = 4, 8  # of one process; of a pipeline
_ROWS, _MICROBATCHES = (128, 384), (1, 3)
_CALLS = (4, 12)  # per microbatch
_STEPS = 4
_SMALL_BYTES, _LARGE_BYTES = 8, 16 << 20
_SMALL_REPEATS, _LARGE_REPEATS = 200, 8
_LIMIT_S = 40.0


def rates() -> dict[str, object]:
    """Measures FLOPs and bytes per second of a core, with all cores busy and with the others idle.

    Returns:
        Rates of one busy core; `alone` is how many times as fast a core is while the others idle.
    """
    smp.init({"ddp": True})
    torch.set_num_threads(1)
    alone = _rates() if smp.rank() == 0 else {}
    smp.barrier()
    found = _rates()
    smp.barrier()
    faster = 1.0
    if smp.rank() == 0 and smp.size() > 1:
        faster = alone["flops"]["fp32"] / found["flops"]["fp32"]
    return {**found, "alone": faster}


def _rates() -> dict[str, Any]:
    flops = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        left, right = (torch.ones(_PRODUCT_WIDTH, _PRODUCT_WIDTH, dtype=dtype) for _ in range(2))
        flops[name] = 2 * _PRODUCT_WIDTH**3 / _typical_s(partial(torch.mm, left, right))
    source = torch.ones(_MOVED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy_s = _typical_s(lambda: target.copy_(source))
    # A copy reads and writes each byte.
    return {"flops": flops, "moved": 2 * _MOVED_BYTES / copy_s, "copied": _MOVED_BYTES / copy_s}


def _typical_s(run: Callable[[], object]) -> float:
    """Returns the median over a window of time, the same on all ranks that measure together."""
    run()
    samples: list[float] = []
    begin_s = time.perf_counter()
    while len(samples) < _FEWEST or time.perf_counter() - begin_s < _WINDOW_S:
        started_s = time.perf_counter()
        run()
        samples.append(time.perf_counter() - started_s)
    return statistics.median(samples)


def messages() -> dict[str, object]:
    """Measures the round trip of a small message and the bandwidth of a large one."""
    smp.init({"pipeline_parallel_degree": 2})
    rank = runtime.current().rank
    assert rank.mailbox is not None and rank.board is not None
    probe = _C.LinkProbe(rank.mailbox, rank.board)
    smp.barrier()
    found: dict[str, object] = {}
    if smp.rank() == 0:
        small = probe.measure(1, _SMALL_BYTES, _SMALL_REPEATS, _LIMIT_S)
        large = probe.measure(1, _LARGE_BYTES, _LARGE_REPEATS, _LIMIT_S)
        found = {
            "latency_s": statistics.median(both for _, both in small) / 2,
            # Each byte travels there and back.
            "bytes_per_s": 2 * _LARGE_BYTES / min(both for _, both in large),
        }
    smp.barrier()
    return found


class _Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
        self.heads = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.joined = nn.Linear(_WIDTH, _WIDTH)
        self.wide = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.narrow = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        parts = self.heads(self.norms[0](values)).chunk(3, -1)
        query, key, value = (p.unflatten(-1, (_HEADS, -1)).transpose(1, 2) for p in parts)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.joined(found.transpose(1, 2).flatten(2))
        result: Tensor = values + self.narrow(functional.gelu(self.wide(self.norms[1](values))))
        return result


class _Transformer(nn.Module):
    """A small transformer with its loss."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(_TABLE, _WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(num_layers)))
        self.head = nn.Linear(_WIDTH, _TABLE, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.table(ids)))
        loss: Tensor = functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return loss


def training() -> dict[str, object]:
    """Measures processor seconds of training that do not depend on rows, for each element.

    Parameters are read and packed for products, gradients written and added. What a microbatch
    takes for no rows at all is that, by two numbers of rows.
    """
    found: dict[tuple[int, int], float] = {}
    updates = []
    for rows in _ROWS:
        for microbatches in _MICROBATCHES:
            found[rows, microbatches], update_s = _trained_s(rows, microbatches)
            updates.append(update_s)
    (less, more), (few, many) = _ROWS, _MICROBATCHES
    each = {rows: (found[rows, many] - found[rows, few]) / (many - few) for rows in _ROWS}
    row_s = (each[more] - each[less]) / (more - less)
    elements = sum(parameter.numel() for parameter in _Transformer(_FEW_LAYERS).parameters())
    return {
        "microbatch s": (each[less] - less * row_s) / elements,
        "update s": statistics.median(updates) / elements,
    }


def sums() -> dict[str, object]:
    """Measures seconds of an all-reduce of gradients, for each byte of a rank."""
    smp.init({"ddp": True})
    torch.set_num_threads(1)
    rank = runtime.current().rank
    communicator = rank.comms.dp_cp
    assert communicator is not None, "there are several ranks"
    gradients = torch.zeros(_MOVED_BYTES // 4).split(bucket_cap_bytes(DEFAULT_MB, rank.device) // 4)
    spent = []
    for _ in range(_STEPS):
        smp.barrier()
        started_s = time.perf_counter()
        for bucket in gradients:
            communicator.all_reduce(bucket).wait(rank.timeout_s)
        spent.append(time.perf_counter() - started_s)
    return {"byte s": statistics.median(spent) / _MOVED_BYTES}


def _trained_s(rows: int, microbatches: int) -> tuple[float, float]:
    """Returns processor seconds of a step function and of an update, the mean of all ranks."""
    step, data, model = _training_step(
        {"ddp": True, "microbatches": microbatches}, rows, _FEW_LAYERS
    )
    optimizer = _optimizer(model)
    spent = []
    for _ in range(2 + _STEPS):
        smp.barrier()
        started_s = time.process_time()
        step(data)
        stepped_s = time.process_time()
        optimizer.step()
        optimizer.zero_grad()
        spent.append((stepped_s - started_s, time.process_time() - stepped_s))
    own = [statistics.median(each) for each in zip(*spent[2:], strict=True)]
    steps, updates = zip(*smp.allgather(own, smp.WORLD), strict=True)
    return statistics.fmean(steps), statistics.fmean(updates)


def _optimizer(model: nn.Module) -> smp.DistributedOptimizer:
    return smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), fused=True))


def pipeline(known: str) -> dict[str, object]:
    """Measures and predicts seconds of a step of a pipeline on two cores.

    Args:
        known: text of a hardware file of this machine, whose `crowded` is 1.
    """
    cores = sorted(os.sched_getaffinity(0))[:_SHARED_CORES]
    os.sched_setaffinity(0, cores)
    size = int(os.environ["SMP_WORLD_SIZE"])
    layout = Layout(pp=size, microbatches=4 * _SHARED_CORES, active=size)
    device = replace(hardware.read(known, "calibration"), at_once=len(cores))
    step, data, model = _training_step(layout.config(), _TOKENS, _MANY_LAYERS)
    optimizer = _optimizer(model)
    spent = []
    for _ in range(2 + _STEPS):
        smp.barrier()
        started_s = time.perf_counter()
        step(data)
        optimizer.step()
        optimizer.zero_grad()
        smp.barrier()
        spent.append(time.perf_counter() - started_s)
    return {
        "measured s": statistics.median(spent[2:]),
        "predicted s": _predicted_s(layout, device) if smp.rank() == 0 else None,
    }


def _predicted_s(layout: Layout, device: Hardware) -> float:
    """Returns predicted seconds of a step of `_Transformer` on one host."""
    with torch.device("meta"):
        model = _Transformer(_MANY_LAYERS)
    sample = torch.zeros(1, _TOKENS, dtype=torch.int64)
    view = View.of(model, ((sample,), {}), device, "fp32")
    job = Job(view, device, layout.pp, layout.pp, device.memory_bytes, layout.samples, "fp32")
    return predict(job, layout).time.total


def _training_step(
    config: Mapping[str, Any], rows: int, num_layers: int
) -> tuple[Callable[[Tensor], object], Tensor, nn.Module]:
    """Begins a run and returns a step function of `_Transformer`, its data and the model."""
    _begin(config)
    torch.set_num_threads(1)
    model = smp.DistributedModel(_Transformer(num_layers))
    data = torch.arange(config["microbatches"] * rows).reshape(-1, _TOKENS) % _TABLE

    @smp.step
    def step(data: Tensor) -> Tensor:
        loss: Tensor = model(data)
        model.backward(loss)
        return loss.detach()

    return step, data, model


def _begin(config: Mapping[str, Any]) -> None:
    """Ends the run before and begins a new one."""
    if runtime.is_initialized():
        smp.shutdown()
    smp.init(config)


class _Caller(nn.Module):
    """A module that calls modules of the other rank, which compute next to nothing."""

    def __init__(self, num_calls: int) -> None:
        super().__init__()
        with smp.partition(0):
            self.first = nn.Linear(8, 8)
        with smp.partition(1):
            self.others = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_calls))

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)
        for other in self.others:
            values = other(values)
        return values.sum()


def calls() -> dict[str, object]:
    """Measures processor seconds of a remote call with its backward, on both ranks."""
    found = {}
    for num_calls in _CALLS:
        for microbatches in (1, 8):
            found[num_calls, microbatches] = _step_s(num_calls, microbatches)
    few, many = _CALLS
    call_s = (found[many, 8] - found[few, 8]) / (8 * (many - few))
    microbatch_s = (found[few, 8] - found[few, 1]) / 7 - few * call_s
    return {"call s": call_s, "microbatch s": microbatch_s}


def _step_s(num_calls: int, microbatches: int) -> float:
    _begin(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": microbatches,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    model = smp.DistributedModel(_Caller(num_calls))
    data = torch.ones(microbatches, 8)

    @smp.step
    def step(values: Tensor) -> Tensor:
        loss: Tensor = model(values)
        model.backward(loss)
        return loss.detach()

    for _ in range(3):
        step(data)
    spent = []
    for _ in range(_STEPS):
        smp.barrier()
        started_s = time.process_time()
        step(data)
        smp.barrier()
        spent.append(time.process_time() - started_s)
    total: float = sum(smp.allgather(statistics.median(spent), smp.WORLD))
    return total


_KINDS: dict[str, Callable[..., dict[str, object]]] = {
    "rates": rates,
    "messages": messages,
    "training": training,
    "sums": sums,
    "pipeline": pipeline,
    "calls": calls,
}


def main() -> None:
    """Measures one kind; rank 0 prints the result."""
    kind, *arguments = sys.argv[1:]
    found = _KINDS[kind](*arguments)
    is_first = smp.rank() == 0
    smp.shutdown()
    if is_first:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
