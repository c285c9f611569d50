"""Contenders that train the same GPT-J: Hugging Face as it comes, compiled, and `smp.nn`.

Parameters are float32 and compute is bf16 for all: by `torch.autocast` for Hugging Face, whose
optimizer is PyTorch's fused AdamW, by ``{"bf16": True}`` for smp with `smp.optimizers.FusedAdam`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPTJConfig, GPTJForCausalLM

import smp
from benchmarks.gpu.arithmetic import Shape
from benchmarks.gpu.device import Device

Batch = dict[str, Tensor]
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Way:
    """A way to train a model.

    Attributes:
        microbatch: sequences of a microbatch.
        microbatches: number of microbatches in a step.
        recompute: each layer in backward.
    """

    shape: Shape
    microbatch: int
    microbatches: int
    recompute: bool


@dataclass(frozen=True)
class Contender:
    """Something that trains.

    Attributes:
        compute: forward and backward of a batch; returns the mean loss.
        update: updates the parameters and clears their gradients.
    """

    compute: Callable[[Batch], Tensor]
    update: Callable[[], object]


def make_batch(device: Device, way: Way) -> Batch:
    """Random tokens, without a mask."""
    generator = torch.Generator().manual_seed(5)
    size = (way.microbatch * way.microbatches, way.shape.seq)
    ids = torch.randint(0, way.shape.vocab, size, generator=generator).to(device.kind)
    return {"input_ids": ids, "labels": ids}


def make_model(device: Device, shape: Shape) -> GPTJForCausalLM:
    """Makes the model with the class's own random weights, on the device, in float32."""
    config = GPTJConfig(
        n_layer=shape.layers,
        n_embd=shape.hidden,
        n_head=shape.heads,
        rotary_dim=shape.rotary,
        vocab_size=shape.vocab,
        n_positions=shape.seq,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(7)
    with torch.device(device.kind):
        return GPTJForCausalLM(config).train()


@contextlib.contextmanager
def hugging_face(device: Device, way: Way, compiled: bool = False) -> Iterator[Contender]:
    """Gradients are accumulated over microbatches, as its Trainer does."""
    model = make_model(device, way.shape)
    if way.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    # A dry run traces as well, and leaves out the compiler of C++.
    backend = "inductor" if device.is_cuda else "aot_eager"
    called: nn.Module = torch.compile(model, backend=backend) if compiled else model

    def compute(batch: Batch) -> Tensor:
        losses = []
        for mb in range(way.microbatches):
            piece = {k: v.chunk(way.microbatches)[mb] for k, v in batch.items()}
            with torch.autocast(device.kind, torch.bfloat16):
                loss = called(**piece).loss
            (loss / way.microbatches).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    try:
        yield Contender(compute, update)
    finally:
        torch._dynamo.reset()


@contextlib.contextmanager
def smp_nn(device: Device, way: Way) -> Iterator[Contender]:
    """`smp.nn` at tensor-parallel degree 1."""
    with _one_rank(device, way.microbatches):
        with smp.tensor_parallelism():
            plain = make_model(device, way.shape)
        model = smp.DistributedModel(plain)
        del plain
        optimizer = smp.DistributedOptimizer(
            smp.optimizers.FusedAdam(model.parameters(), lr=LEARNING_RATE)
        )
        if way.recompute:
            smp.set_activation_checkpointing(
                layers_of(model), pack_args_as_tuple=True, strategy="each"
            )

        @smp.step
        def train_step(batch: Batch) -> Tensor:
            loss: Tensor = model(**batch)["loss"]
            model.backward(loss)
            return loss

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        yield Contender(lambda batch: train_step(batch).reduce_mean(), update)


CONTENDERS: dict[str, Callable[[Device, Way], contextlib.AbstractContextManager[Contender]]] = {
    "smp.nn": smp_nn,
    "Hugging Face": hugging_face,
    "Hugging Face, compiled": lambda device, way: hugging_face(device, way, compiled=True),
}


@contextlib.contextmanager
def smp_layer(
    device: Device, hidden: int, heads: int, seq: int, batch: int
) -> Iterator[Callable[[Batch], Any]]:
    """Forward and backward of one layer of `smp.nn` with a small vocabulary."""
    rotary = max(2, hidden // heads // 4)
    shape = Shape(layers=1, hidden=hidden, heads=heads, rotary=rotary, vocab=64, seq=seq)
    with smp_nn(device, Way(shape, batch, 1, recompute=False)) as contender:
        yield contender.compute


def layers_of(model: nn.Module) -> nn.Module:
    """The sequence of transformer layers of a model of `smp.nn`."""
    [found] = [m for name, m in model.named_modules() if name.endswith("seq_layers")]
    return found


@contextlib.contextmanager
def _one_rank(device: Device, microbatches: int) -> Iterator[None]:
    """smp with one rank in this process, on the device."""
    before = dict(os.environ)
    os.environ |= {"SMP_DEVICE": device.kind, "SMP_CHECK_FIRST_STEP": "0"}
    try:
        smp.init({"microbatches": microbatches, "bf16": True})
        yield
    finally:
        smp.shutdown()
        os.environ.clear()
        os.environ |= before
