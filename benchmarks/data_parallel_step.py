"""Step time of two replicas, next to torch's DistributedDataParallel.

Several microbatches: DDP accumulates under `no_sync`, so both contenders reduce once per step.
"""

from __future__ import annotations

import contextlib

import torch
from models import Gpt, GptShape, make_batch, make_optimizer
from timer import compare, measure
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from workers import Worker

import smp


def make_smp(shape: GptShape, batch: tuple[Tensor, Tensor]):
    torch.manual_seed(0)
    model = smp.DistributedModel(Gpt(shape, 1))
    optimizer = smp.DistributedOptimizer(make_optimizer(model))

    @smp.step
    def train_step(ids: Tensor, targets: Tensor) -> Tensor:
        loss = model(ids, targets)
        model.backward(loss)
        return loss

    def run() -> None:
        train_step(*batch)
        optimizer.step()
        optimizer.zero_grad()

    return run


def make_ddp(shape: GptShape, batch: tuple[Tensor, Tensor], num_microbatches: int):
    torch.manual_seed(0)
    model = DistributedDataParallel(Gpt(shape, 1))
    optimizer = make_optimizer(model)
    pieces = list(zip(*(tensor.chunk(num_microbatches) for tensor in batch), strict=True))

    def run() -> None:
        for mb, (ids, targets) in enumerate(pieces):
            is_last = mb == num_microbatches - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                (model(ids, targets) / num_microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def main() -> None:
    worker = Worker("data_parallel_step")
    config = worker.config
    shape, num_microbatches = GptShape(**config["shape"]), config["microbatches"]
    worker.start({"microbatches": num_microbatches})
    batch = make_batch(shape, config["batch_size"], seed=1 + smp.dp_rank())
    contenders = {
        "smp": make_smp(shape, batch),
        "torch_ddp": make_ddp(shape, batch, num_microbatches),
    }
    timings = measure(contenders, worker.repeats, worker.warmup, distributed.barrier)
    worker.emit("torch_ddp", timings["torch_ddp"].summary())
    ratio = compare(timings["smp"], timings["torch_ddp"])
    worker.emit("smp", timings["smp"].summary() | ratio)
    smp.shutdown()


if __name__ == "__main__":
    main()
