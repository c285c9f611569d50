"""Step time and memory of a small language model with a large vocabulary, split over two ranks.

`split` computes the loss over the parts of the vocabulary, `gathered` gathers the logits before it,
as a plan says it; the model, its weights and its batch are the same. A step is forward, backward
and the reduction of gradients. The losses must agree, or the run fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from allocation_meter import AllocationMeter
from timer import compare, measure
from torch import Tensor, distributed
from transformers import Qwen3Config, Qwen3ForCausalLM
from workers import Worker

import smp
from smp.nn.planned.linear import PlannedGatheredColumn
from smp.tensor_parallel import regions


def training(worker: Worker, batch: dict[str, Tensor], is_split: bool) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    with smp.tensor_parallelism():
        plain: Any = Qwen3ForCausalLM(Qwen3Config(use_cache=False, **worker.config["qwen3"]))
    plain.to(getattr(torch, worker.config["dtype"]))
    model = smp.DistributedModel(plain)
    if not is_split:
        plain.lm_head.__class__ = PlannedGatheredColumn

    @smp.step
    def train_step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch)["loss"]
        model.backward(loss)
        return loss.detach()

    def run() -> Tensor:
        loss = train_step(batch).outputs[0]
        model.zero_grad()
        return loss

    return run


def main() -> None:
    worker = Worker("planned_head")
    prescaled = worker.config["prescaled"]
    worker.start({"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": prescaled})
    generator = torch.Generator().manual_seed(1 + (0 if prescaled else smp.tp_rank()))
    shape = (worker.config["batch_size"], worker.config["sequence"])
    ids = torch.randint(2, worker.config["qwen3"]["vocab_size"], shape, generator=generator)
    batch = {"input_ids": ids, "labels": ids}
    contenders = {name: training(worker, batch, name == "split") for name in ("gathered", "split")}
    meter = AllocationMeter()
    expected, values = contenders["gathered"](), {}
    torch.testing.assert_close(contenders["split"](), expected, rtol=1e-3, atol=1e-3)
    for name, run in contenders.items():
        held, before = meter.restart(), regions.traffic()[1]
        run()
        values[name] = {
            "peak_mb": (meter.peak() - held) / 1e6,
            "sent_mb": (regions.traffic()[1] - before) / 1e6,
        }
    timings = measure(dict(contenders), worker.repeats, worker.warmup, distributed.barrier)
    for name, timing in timings.items():
        worker.emit(name, timing.summary() | compare(timing, timings["gathered"]) | values[name])
    smp.shutdown()


if __name__ == "__main__":
    main()
