"""Step time of a stack of transformer layers on two ranks, next to PyTorch's DTensor.

All contenders compute the same function of the same batch with the same weights: `one_process` on
each rank alone, `dtensor` with ColwiseParallel and RowwiseParallel layers, `dtensor_sequence` with
the sequence split between these, `smp_speed` and `smp_memory` with `prescaled_batch`, and `smp_own`
with half of the batch on each rank. A step is forward and backward with whatever reduction of
gradients belongs to it; DTensor leaves gradients of norms and biases to its optimizer, as parts of
sums. The outputs must agree, or the run fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from models import Block, GptShape
from timer import Timing, compare, measure
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from workers import Worker

import smp
from smp.tensor_parallel import regions

BASE = {"tensor_parallel_degree": 2}
DTENSOR = ("dtensor", "dtensor_sequence")
# Bytes that one of two ranks sends, in shares of the bytes that it passes to the operation.
SHARES = {"all_reduce": 1.0, "all_gather_into_tensor": 1.0, "reduce_scatter_tensor": 0.5}


class Attention(nn.Module):
    """The attention of a block of `models.py` with query, key and value apart."""

    def __init__(self, whole: Block) -> None:
        super().__init__()
        hidden = whole.proj.in_features
        self.head_size = hidden // whole.num_heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        for idx, layer in enumerate((self.query, self.key, self.value)):
            rows = slice(idx * hidden, (idx + 1) * hidden)
            layer.weight.data.copy_(whole.qkv.weight[rows])
            layer.bias.data.copy_(whole.qkv.bias[rows])
        self.proj = whole.proj

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.query, self.key, self.value)
        q, k, v = (f(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for f in layers)
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(context.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The two other products of a block of `models.py`."""

    def __init__(self, whole: Block) -> None:
        super().__init__()
        self.up, self.down = whole.up, whole.down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class SeparateBlock(nn.Module):
    """The block of `models.py` in parts that DTensor can split."""

    def __init__(self, whole: Block) -> None:
        super().__init__()
        self.norm1, self.norm2 = whole.norm1, whole.norm2
        self.attention, self.output = Attention(whole), FeedForward(whole)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.output(self.norm2(x))


def plain_stack(shape: GptShape) -> nn.Sequential:
    """The same weights on every rank and at every call."""
    torch.manual_seed(0)
    return nn.Sequential(*(SeparateBlock(Block(shape)) for _ in range(shape.num_layers)))


COLUMNS = ("attention.query", "attention.key", "attention.value", "output.up")
ROWS = ("attention.proj", "output.down")


def dtensor_stack(shape: GptShape) -> nn.Module:
    """Split as the tutorials of PyTorch do."""
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
    stack = plain_stack(shape)
    plan: dict[str, Any] = dict.fromkeys(COLUMNS, ColwiseParallel())
    plan |= dict.fromkeys(ROWS, RowwiseParallel())
    for block in stack:
        parallelize_module(block, mesh, plan)
    return stack


def sequence_stack(shape: GptShape) -> nn.Module:
    """Split as the tutorials of PyTorch do with the sequence split between the products."""
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
    stack = plain_stack(shape)
    # One gather feeds all columns of a part.
    gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan: dict[str, Any] = dict.fromkeys(COLUMNS, ColwiseParallel())
    plan |= dict.fromkeys(ROWS, RowwiseParallel(output_layouts=Shard(1)))
    plan |= {"attention": gather, "output": gather}
    plan |= dict.fromkeys(("norm1", "norm2"), SequenceParallel())
    for block in stack:
        parallelize_module(block, mesh, plan)
    first = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
    )
    last = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    parallelize_module(stack[0], mesh, first)
    parallelize_module(stack[-1], mesh, last)
    return stack


def smp_stack(shape: GptShape) -> smp.nn.DistributedTransformer:
    """The library's layers with the weights of the plain stack."""
    stack = smp.nn.DistributedTransformer(
        num_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        attention_head_size=shape.hidden // shape.num_heads,
        hidden_size=shape.hidden,
        intermediate_size=4 * shape.hidden,
        attention_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        causal_mask_size=shape.seq_len,
        pre_layernorm=True,
        post_layernorm=False,
    )
    names = {name: f"attention.{name}" for name in ("query", "key", "value")}
    names["dense"] = "attention.proj"
    whole = {}
    for idx, block in enumerate(plain_stack(shape)):
        ours = f"seq_layers.{idx}"
        pairs = {f"attention.{new}": old for new, old in names.items()}
        pairs |= {"attention.pre_layernorm": "norm1", "output.pre_layernorm": "norm2"}
        pairs |= {"output.dense1": "output.up", "output.dense2": "output.down"}
        for new, old in pairs.items():
            for key, value in block.get_submodule(old).state_dict().items():
                whole[f"{ours}.{new}.{key}"] = value
    model = smp.DistributedModel(stack)
    model.load_state_dict(whole)
    return model


def smp_step(shape: GptShape, config: dict[str, Any], x: Tensor) -> Callable[[], Tensor]:
    smp.init({"ddp": True, **BASE, **config})
    model = smp_stack(shape)

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        output = model((x, None))[0]
        model.backward(output.square().mean())
        return output.detach()

    def run() -> Tensor:
        output = train_step(x).outputs[0]
        model.zero_grad()
        return output

    return run


def plain_step(stack: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        output = stack(x)
        if isinstance(output, DTensor):
            output = output.full_tensor()
        output.square().mean().backward()
        stack.zero_grad()
        return output.detach()

    return run


def check_outputs(contenders: dict[str, Callable[[], Tensor]], halves: set[str]) -> None:
    """Checks that all contenders compute the same; the comparison means nothing otherwise."""
    expected = contenders["one_process"]()
    for name, run in contenders.items():
        output = run()
        wanted = expected.chunk(2)[smp.tp_rank()] if name in halves else expected
        torch.testing.assert_close(output, wanted, rtol=1e-3, atol=1e-4, msg=name)


class CountedTraffic(TorchDispatchMode):
    """Bytes that a rank of two has to send at the least for what DTensor communicates."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(func)
        if name.startswith("_c10d_functional."):
            share = next((v for k, v in SHARES.items() if f".{k}" in name), 0.0)
            self.num_bytes += share * args[0].nbytes
        return func(*args, **(kwargs or {}))


def sent_mb(contenders: Mapping[str, Callable[[], Tensor]]) -> dict[str, float]:
    """MB that this rank had to send at the least in one step, by contender."""
    sent = {}
    for name, run in contenders.items():
        before = regions.traffic()[1]
        with CountedTraffic() as counted:
            run()
        sent[name] = (regions.traffic()[1] - before + counted.num_bytes) / 1e6
    return sent


def main() -> None:
    worker = Worker("tensor_parallel")
    shape, batch = GptShape(**worker.config["shape"]), worker.config["batch_size"]
    worker.start(BASE)
    x = torch.randn(batch, shape.seq_len, shape.hidden, generator=torch.Generator().manual_seed(1))
    own = x.chunk(2)[smp.tp_rank()]
    contenders = {
        "one_process": plain_step(plain_stack(shape), x),
        "dtensor": plain_step(dtensor_stack(shape), x),
        "dtensor_sequence": plain_step(sequence_stack(shape), x),
        "smp_speed": smp_step(shape, {"optimize": "speed", "prescaled_batch": True}, x),
        "smp_memory": smp_step(shape, {"optimize": "memory", "prescaled_batch": True}, x),
        "smp_own": smp_step(shape, {"optimize": "memory", "prescaled_batch": False}, own),
    }
    check_outputs(contenders, {"smp_own"})
    timings = measure(contenders, worker.repeats, worker.warmup, distributed.barrier)
    timings = {name: of_both_ranks(timing) for name, timing in timings.items()}
    emit(worker, timings, sent_mb(contenders))
    smp.shutdown()


def of_both_ranks(timing: Timing) -> Timing:
    """The same with the CPU seconds of both ranks."""
    seconds = torch.tensor(timing.cpu_samples_s, dtype=torch.float64)
    distributed.all_reduce(seconds)
    return Timing(timing.samples_s, tuple(seconds.tolist()))


def better(timings: Mapping[str, Timing]) -> Timing:
    """The times, on the clock and by the CPU, of the form of DTensor that is faster by each."""
    forms = [timings[name] for name in DTENSOR]
    by_clock = min(forms, key=lambda timing: timing.median_s)
    by_cpu = min(forms, key=lambda timing: timing.cpu.median_s)
    return Timing(by_clock.samples_s, by_cpu.cpu_samples_s)


def emit(worker: Worker, timings: dict[str, Timing], sent: Mapping[str, float]) -> None:
    """Times, ratios to the better form of DTensor in the same repeat, and to half of one process.

    CPU seconds are those of both ranks.
    """
    baseline = better(timings)
    for name, timing in timings.items():
        values = timing.summary() | compare(timing, baseline)
        values |= timing.cpu.summary("cpu_")
        ratios = compare(timing.cpu, baseline.cpu)
        values |= {f"cpu_{key}": value for key, value in ratios.items()}
        floor = compare(timing, timings["one_process"])["ratio_median"] * 2
        values["ratio_to_half_of_one_process"] = floor
        values["sent_mb"] = sent[name]
        worker.emit(name, values)


if __name__ == "__main__":
    main()
