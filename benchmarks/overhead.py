"""Measures the cost of smp in one process, next to the plain loop over microbatches."""

from __future__ import annotations

import torch
from data_parallel_step import make_smp
from models import Gpt, GptShape, make_batch, make_optimizer
from timer import Timing, compare, measure
from torch import Tensor
from workers import Worker

import smp


def make_plain(shape: GptShape, batch: tuple[Tensor, Tensor], num_microbatches: int):
    torch.manual_seed(0)
    model = Gpt(shape, 1)
    optimizer = make_optimizer(model)

    def run() -> None:
        pieces = zip(*(tensor.chunk(num_microbatches) for tensor in batch), strict=True)
        for ids, targets in pieces:
            (model(ids, targets) / num_microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def main() -> None:
    worker = Worker("overhead_at_size_1")
    config = worker.config
    shape, num_microbatches = GptShape(**config["shape"]), config["microbatches"]
    worker.start({"microbatches": num_microbatches})
    batch = make_batch(shape, config["batch_size"], seed=1)
    contenders = {
        "smp": make_smp(shape, batch),
        "plain": make_plain(shape, batch, num_microbatches),
    }
    timings = measure(contenders, worker.repeats, worker.warmup)
    worker.emit("plain", timings["plain"].summary())
    pairs = zip(timings["smp"].samples_s, timings["plain"].samples_s, strict=True)
    added = Timing(tuple((own - other) / num_microbatches for own, other in pairs))
    worker.emit(
        "smp",
        timings["smp"].summary()
        | compare(timings["smp"], timings["plain"])
        | added.summary("added_per_microbatch_", scale=1e6, unit="us"),
    )
    smp.shutdown()


if __name__ == "__main__":
    main()
