"""The contenders of `memory`: the same training step by PyTorch's means and by ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from models import Gpt, GptShape
from state_bytes import StateBytes, state_bytes
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import smp

Batch = tuple[Tensor, Tensor]
OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}  # of AdamW, for everybody
CLIP = 1.0  # sharded data parallelism always clips


@dataclass
class Contender:
    """A way to train.

    Attributes:
        run: one step of training; the loss.
        model, optimizer: holders of the bytes that are counted after a step.
    """

    run: Callable[[], Tensor]
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def held(self) -> StateBytes:
        """Bytes on this rank right after an update, gradients included."""
        return state_bytes(self.model, self.optimizer)


def plain_model(shape: GptShape) -> Gpt:
    """The same weights in each process and at each call; its groups are single blocks."""
    torch.manual_seed(0)
    return Gpt(shape, shape.num_layers)


def torch_contender(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, clip: bool
) -> Contender:
    def run() -> Tensor:
        optimizer.zero_grad()  # first, so that gradients are there when bytes are counted
        loss: Tensor = model(*batch)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.detach()

    return Contender(run, model, optimizer)


def fsdp2(shape: GptShape, batch: Batch) -> Contender:
    """Per block, resharded after forward, as its tutorial does."""
    model = plain_model(shape)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.groups:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    return torch_contender(model, optimizer, batch, clip=True)


def ddp(shape: GptShape, batch: Batch) -> Contender:
    model = DistributedDataParallel(plain_model(shape), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    return torch_contender(model, optimizer, batch, clip=False)


def ddp_zero(shape: GptShape, batch: Batch) -> Contender:
    model = DistributedDataParallel(plain_model(shape), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **OPTIONS
    )
    return torch_contender(model, optimizer, batch, clip=False)


def alone(shape: GptShape, batch: Batch) -> Contender:
    model = plain_model(shape)
    return torch_contender(model, torch.optim.AdamW(model.parameters(), **OPTIONS), batch, False)


def torch_checkpoint(shape: GptShape, batch: Batch) -> Contender:
    """Recomputes each block by itself and without reentrance, as PyTorch advises."""
    model = plain_model(shape)
    for block in model.groups:
        _compute_again(block)
    return torch_contender(model, torch.optim.AdamW(model.parameters(), **OPTIONS), batch, False)


def torch_checkpoint_whole(shape: GptShape, batch: Batch) -> Contender:
    """Likewise, but the second run goes on after the last tensor that backward needs."""
    contender = torch_checkpoint(shape, batch)
    run = contender.run

    def run_whole() -> Tensor:
        with set_checkpoint_early_stop(False):
            return run()

    contender.run = run_whole
    return contender


def _compute_again(block: nn.Module) -> None:
    forward = block.forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]


def ours(shape: GptShape, batch: Batch, checkpoints: bool = False) -> Contender:
    """Under the configuration that was given to `smp.init`."""
    plain = plain_model(shape)
    model = smp.DistributedModel(plain)
    if checkpoints:
        for block in plain.groups:
            smp.set_activation_checkpointing(block)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), **OPTIONS))

    @smp.step
    def train_step(ids: Tensor, targets: Tensor) -> Tensor:
        loss = model(ids, targets)
        model.backward(loss)
        return loss

    def run() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = train_step(*batch).reduce_mean()
        optimizer.step()
        return loss.detach()

    return Contender(run, model, optimizer)


SHARDED = {
    "sdp_param_persistence_threshold": 0,
    "sdp_gradient_clipping": CLIP,
    "delayed_parameter_initialization": False,
}
# By subject: configuration of `smp.init` on so many ranks, and contenders; the first one is the
# baseline.
Subject = tuple[
    Callable[[int], Mapping[str, Any]], Mapping[str, Callable[[GptShape, Batch], Contender]]
]
SUBJECTS: Mapping[str, Subject] = {
    "sharded_data": (
        lambda ranks: {"sharded_data_parallel_degree": ranks, **SHARDED},
        {"torch_fsdp2": fsdp2, "smp": ours},
    ),
    "sharded_optimizer": (
        lambda ranks: {"shard_optimizer_state": True},
        {"torch_ddp_zero": ddp_zero, "smp": ours},
    ),
    "replicas": (lambda ranks: {}, {"torch_ddp": ddp, "smp": ours}),
    "checkpointing": (
        lambda ranks: {},
        {
            "torch_checkpoint": torch_checkpoint,
            "torch_checkpoint_whole": torch_checkpoint_whole,
            "torch_plain": alone,
            "smp": lambda shape, batch: ours(shape, batch, checkpoints=True),
        },
    ),
}
