"""Trains a small chain and saves what it has; for tests of preemption, faults and restarts.

Usage: robust.py FOLDER [--steps N] [--ask] [--step-s S]

``--ask``: asks by itself whether to stop, otherwise the library saves. Prints ``RESULT <json>`` at
the end. A file per rank stands for `smp.save_checkpoint`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

import smp

WIDTH = 6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ask", action="store_true")
    parser.add_argument("--step-s", type=float, default=0.0)
    args = parser.parse_args()

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": False})
    torch.manual_seed(5)
    layers = []
    for index in range(2):
        with smp.partition(index):
            layers.append(torch.nn.Linear(WIDTH, WIDTH).double())
    model = smp.DistributedModel(torch.nn.Sequential(*layers))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    counter = {"step": 0}
    resume(args.folder, model, counter)

    def save(path: Path, **options: Any) -> None:
        assert set(options) >= {"tag", "partial", "model", "optimizer", "user_content"}
        file = Path(path) / f"rank{smp.rank()}.pt"
        torch.save({"model": model.local_state_dict(), "step": counter["step"]}, file)
        print(f"SAVED {counter['step']} {options['tag']}", flush=True)

    smp.preemption.use_saver(save)
    if not args.ask and not os.environ.get("SMP_PREEMPTION_PATH"):
        smp.preemption.save_to(args.folder, user_content=lambda: dict(counter))

    @smp.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    print(f"BEGIN {counter['step']}", flush=True)
    while counter["step"] < args.steps:
        data = torch.Generator().manual_seed(counter["step"])
        train_step(torch.randn(4, WIDTH, generator=data, dtype=torch.float64))
        optimizer.step()
        optimizer.zero_grad()
        # Ranks run apart.
        time.sleep(args.step_s * (1 + smp.rank()))
        counter["step"] += 1
        print(f"STEP {counter['step']}", flush=True)
        if args.ask and smp.preemption_requested():
            save(
                args.folder, tag="", partial=True, model=model, optimizer=optimizer, user_content={}
            )
            smp.preemption.leave()
    print("RESULT " + json.dumps({"step": counter["step"], "rank": smp.rank()}), flush=True)


def resume(folder: Path, model: Any, counter: dict[str, int]) -> None:
    """Goes on where all ranks have saved; they must have saved the same step."""
    path = folder / f"rank{smp.rank()}.pt"
    found = smp.allgather(path.is_file(), smp.WORLD)
    assert len(set(found)) == 1, "some ranks saved and others did not"
    if not path.is_file():
        return
    saved = torch.load(path, weights_only=True)
    steps = smp.allgather(saved["step"], smp.WORLD)
    assert len(set(steps)) == 1, f"ranks saved different steps: {steps}"
    model.load_state_dict(saved["model"])
    counter["step"] = saved["step"]


if __name__ == "__main__":
    main()
