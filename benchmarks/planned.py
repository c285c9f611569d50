"""Step time of a Llama on two ranks that is split by its plan, next to transformers' `tp_plan`.

`transformers` is what `from_pretrained` does with `DistributedConfig(tp_plan="auto")`, `planned`
the same plan carried out by the library. Both take one batch on both ranks. `planned_own` reads
half of the batch on each, which transformers cannot: it is compared with the step of transformers
on the whole batch. `one_process` trains all of it on each rank alone. A step is forward, backward
with whatever reduction of gradients belongs to it and, with `optimizer`, AdamW. The losses of three
steps must agree, or the run fails.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from tensor_parallel import sent_mb
from timer import Timing, compare, measure
from torch import Tensor, distributed, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from workers import Worker

import smp

BASE = {"tensor_parallel_degree": 2, "ddp": True}
# Whether both ranks read one batch, by contender.
SPLIT = {"planned": True, "planned_own": False}
Step = Callable[[], Tensor]


def make_model(shape: dict[str, int]) -> Any:
    """The same weights on every rank and at every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(use_cache=False, **shape))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # One parameter after the other: DTensors and plain ones are in no operation together.
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)


def split_step(name: str, shape: dict[str, int], batch: dict[str, Tensor], updates: bool) -> Step:
    smp.init({**BASE, "prescaled_batch": SPLIT[name]})
    plain = make_model(shape)
    smp.set_tensor_parallelism(plain)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(optimizer_of(model))
    if not SPLIT[name]:
        batch = {key: x.chunk(2)[smp.tp_rank()] for key, x in batch.items()}

    @smp.step
    def train_step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch)["loss"]
        model.backward(loss)
        return loss.detach()

    def run() -> Tensor:
        loss = train_step(batch).outputs[0]
        if updates:
            optimizer.step()
        optimizer.zero_grad()
        return loss

    return run


def plain_step(model: Any, batch: dict[str, Tensor], updates: bool) -> Step:
    optimizer = optimizer_of(model)

    def run() -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward()
        if updates:
            optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


def transformers_model(shape: dict[str, int]) -> Any:
    """Split as `from_pretrained` splits, which takes weights from a file."""
    wanted = DistributedConfig(tp_plan="auto", tp_size=2)
    config, _, mesh = LlamaForCausalLM.prepare_distribute_model(wanted)
    model = LlamaForCausalLM.maybe_distribute_model(make_model(shape), config, mesh)
    width = model.model.layers[0].mlp.gate_proj.weight.to_local().shape[0]
    if width * 2 != shape["intermediate_size"]:
        raise RuntimeError(f"transformers did not split the model: a rank has {width} features")
    return model


def check_losses(contenders: dict[str, Step]) -> None:
    """Checks that all contenders train alike; the comparison means nothing otherwise."""
    expected = torch.stack([contenders["one_process"]() for _ in range(3)])
    for name, run in contenders.items():
        if name == "one_process":
            continue
        losses = torch.stack([run() for _ in range(3)])
        if name.endswith("_own"):
            distributed.all_reduce(losses)
            losses /= 2
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4, msg=name)


def main() -> None:
    worker = Worker("planned")
    shape, samples = dict(worker.config["llama"]), worker.config["batch_size"]
    updates = bool(worker.config["optimizer"])
    worker.start(BASE)
    generator = torch.Generator().manual_seed(1)
    size = (samples, worker.config["sequence"])
    ids = torch.randint(2, shape["vocab_size"], size, generator=generator)
    batch = {"input_ids": ids, "labels": ids}
    contenders: dict[str, Step] = {
        "one_process": plain_step(make_model(shape), batch, updates),
        "transformers": plain_step(transformers_model(shape), batch, updates),
    }
    for name in SPLIT:
        contenders[name] = split_step(name, shape, batch, updates)
    check_losses(contenders)
    timings = measure(contenders, worker.repeats, worker.warmup, distributed.barrier)
    emit(worker, timings, sent_mb(contenders))
    smp.shutdown()


def cpu_s(timing: Timing) -> float:
    """Returns this process's median CPU time of a step: on a busy machine it is steadier."""
    return statistics.median(timing.cpu_samples_s)


def emit(worker: Worker, timings: dict[str, Timing], sent: dict[str, float]) -> None:
    """Times, and ratios to transformers in the same repeat."""
    for name, timing in timings.items():
        values = timing.summary() | compare(timing, timings["transformers"])
        half = compare(timing, timings["one_process"])["ratio_median"] * 2
        values["ratio_to_half_of_one_process"] = half
        values["cpu_ms"] = cpu_s(timing) * 1e3
        values["cpu_ratio"] = cpu_s(timing) / cpu_s(timings["transformers"])
        values["sent_mb"] = sent[name]
        worker.emit(name, values)


if __name__ == "__main__":
    main()
