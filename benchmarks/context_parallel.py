"""Step time and memory of a Llama whose sequences two ranks share, next to one process.

All contenders train the same weights on the same sequence: `one_process` on each rank alone, and
`smp` with `context_parallel_degree`. A step is forward, backward and the reduction of gradients.
Losses and gradients must agree, or the run fails. PyTorch's `context_parallel` is tried as well; on
the CPU it gives an error, which is emitted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from allocation_meter import AllocationMeter
from memory import MB, most_over_ranks
from tensor_parallel import of_both_ranks
from timer import compare, measure
from torch import Tensor, distributed
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from workers import Worker

import smp

BASE = {"context_parallel_degree": 2, "ddp": True}
WARMUP = 1  # besides the steps that compare gradients
Step = Callable[[], Tensor]


def make_model(shape: dict[str, int]) -> Any:
    """The same weights on every rank and at every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(use_cache=False, **shape))


def plain_step(model: Any, ids: Tensor) -> Step:
    def run() -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    return run


def split_step(model: Any, ids: Tensor) -> Step:
    @smp.step
    def train_step(ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids)["loss"]
        model.backward(loss)
        return loss.detach()

    return lambda: train_step(ids).outputs[0]


def clearing(model: Any, run: Step) -> Step:
    """Returns a step that drops gradients at its end."""

    def step() -> Tensor:
        loss = run()
        model.zero_grad(set_to_none=True)
        return loss

    return step


def check(models: dict[str, Any], runs: dict[str, Step]) -> None:
    """Compares losses and gradients; the comparison of times means nothing otherwise."""
    losses = {name: run() for name, run in runs.items()}
    torch.testing.assert_close(losses["smp"], losses["one_process"], rtol=1e-4, atol=0)
    found = {n.removeprefix("module."): p.grad for n, p in models["smp"].local_named_parameters()}
    for name, parameter in models["one_process"].named_parameters():
        assert parameter.grad is not None and found[name] is not None
        difference = (found[name] - parameter.grad).norm() / parameter.grad.norm()
        if not difference < 1e-3:
            raise ValueError(f"gradients of {name} differ by {difference}")


def error_of_pytorch() -> str:
    """Returns the error of PyTorch's own context parallelism in causal attention.

    It is empty if the result has this rank's half of the tokens.
    """
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
    query, key, value = (torch.randn(1, 8, 256, 32) for _ in range(3))
    try:
        with context_parallel(mesh, buffers=[query, key, value], buffer_seq_dims=[2, 2, 2]):
            output = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return "" if output.shape[2] == 128 else f"a result of shape {tuple(output.shape)}"


def peak_of(run: Step, meter: AllocationMeter) -> int:
    """Returns the most bytes that a step allocates besides what is there before."""
    gc.collect()
    live = meter.restart()
    run()
    return most_over_ranks(meter.peak() - live)


def main() -> None:
    worker = Worker("context_parallel")
    shape, length = worker.config["llama"], worker.config["tokens"]
    worker.start({**BASE, "context_parallel_ring_degree": worker.config["ring"]})
    meter = AllocationMeter()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(shape["vocab_size"], (1, length), generator=generator)
    plain, model = make_model(shape), smp.DistributedModel(make_model(shape))
    models = {"one_process": plain, "smp": model}
    runs = {"one_process": plain_step(plain, ids), "smp": split_step(model, ids)}
    check(models, runs)
    blocks = model._engine.sequences.blocks
    assert blocks and all(block.num_cut and not block.problems for block in blocks)
    assert all(block.shares_heads == (worker.config["ring"] == 1) for block in blocks)
    steps = {name: clearing(models[name], run) for name, run in runs.items()}
    timings = measure(steps, worker.repeats, WARMUP, distributed.barrier)
    timings = {name: of_both_ranks(timing) for name, timing in timings.items()}
    peaks = {name: peak_of(step, meter) for name, step in steps.items()}
    for name, timing in timings.items():
        values: dict[str, Any] = timing.summary() | compare(timing, timings["one_process"])
        values |= timing.cpu.summary("cpu_of_both_ranks_")
        cpu = compare(timing.cpu, timings["one_process"].cpu)
        values |= {f"cpu_{key}": value for key, value in cpu.items()}
        values["step_peak_mb"] = peaks[name] / MB
        values["peak_ratio"] = peaks[name] / peaks["one_process"]
        worker.emit(name, values)
    # Last, because after an error it does not restore the function that it has replaced.
    worker.emit("pytorch", {"error": error_of_pytorch()})
    smp.shutdown()


if __name__ == "__main__":
    main()
