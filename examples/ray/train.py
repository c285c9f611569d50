"""A pipeline of two stages under Ray Train, which goes on from its checkpoint when a worker dies.

    python examples/ray/train.py --folder /a/folder/that/all/nodes/see

Ray starts the workers, sees when one ends, starts all of them again, and keeps the newest
checkpoints; what they train is a script as any other. Each checkpoint is a folder of
`smp.save_checkpoint`, which all workers write together where Ray keeps it: nothing is copied.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchTrainer
from torch import nn

import smp

ROWS, WIDTH = 8, 16


def make_model() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers)


def batch_of(step: int) -> torch.Tensor:
    """The data of a step: they depend on nothing else, so a restart sees the same."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def train_loop(config: dict[str, Any]) -> None:
    """Trains in each worker. Ray has made a group of torch.distributed; smp.init finds it."""
    smp.init({"pipeline_parallel_degree": config["pp"], "microbatches": 2, "ddp": True})
    torch.manual_seed(1)
    model = smp.DistributedModel(make_model())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    @smp.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - x).square().mean()
        model.backward(loss)
        return loss

    first = 0
    if checkpoint := ray.train.get_checkpoint():
        first = smp.resume_from_checkpoint(checkpoint.path)["step"]
    print(f"worker {smp.rank()} of {smp.size()}: step {first}, process {os.getpid()}", flush=True)
    for step in range(first, config["steps"]):
        rows = batch_of(step)[smp.dp_rank() :: smp.dp_size()]
        loss = train_step(rows).reduce_mean()
        optimizer.step()
        optimizer.zero_grad()
        if smp.rank() == 0:
            print(f"step {step + 1}: loss {float(loss):.6f}", flush=True)
        report(config, step + 1, float(loss), model, optimizer)
    smp.shutdown()  # before Ray ends the group


def report(
    config: dict[str, Any],
    step: int,
    loss: float,
    model: smp.DistributedModel,
    optimizer: smp.DistributedOptimizer,
) -> None:
    """Tells Ray of a step, after some with a checkpoint. Collective: Ray waits for all workers."""
    metrics = {"step": step, "loss": loss}
    if step % config["save_every"] and step != config["steps"]:
        ray.train.report(metrics)
        return
    storage = ray.train.get_context().get_storage()
    folder = Path(storage.experiment_fs_path) / f"step{step}"
    smp.save_checkpoint(
        folder, tag="ray", model=model, optimizer=optimizer, user_content={"step": step}
    )
    checkpoint = Checkpoint.from_directory(folder) if smp.rank() == 0 else None
    ray.train.report(
        metrics, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="that all nodes see")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2, help="stages; the rest are replicas")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5, help="steps")
    parser.add_argument("--gpus", action="store_true", help="one for each worker")
    parser.add_argument("--restarts", type=int, default=3, help="of all workers, at most")
    return parser.parse_args()


def main() -> None:
    args = parse()
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={
            "pp": args.pp,
            "steps": args.steps,
            "save_every": args.save_every,
        },
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        run_config=RunConfig(
            name="smp",
            storage_path=str(args.folder.resolve()),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=args.restarts),
        ),
    )
    result = trainer.fit()
    print(f"RESULT {result.metrics}")


if __name__ == "__main__":
    main()
