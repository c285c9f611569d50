"""Trains a small model with dropout and goes on from its checkpoints; for tests of preemption,
faults, deaths and restarts.

Prints ``BEGIN <step>``, ``STEP <number of steps done> <loss>`` and at the end ``RESULT <json>``,
floats in hexadecimal. The data depend on the step alone, dropout on the random state.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import smp

WIDTH = 8


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--step-s", type=float, default=0.0, help="rank r sleeps 1 + r times this")
    parser.add_argument("--config", type=json.loads, default={"pipeline_parallel_degree": 2})
    parser.add_argument("--rows", type=int, default=8, help="of the largest parameter")
    parser.add_argument("--ask", action="store_true", help="asks by itself whether to stop")
    parser.add_argument("--save-each", action="store_true", help="saves after each step")
    parser.add_argument("--hold", type=Path, help="waits for this file 5 steps before the end")
    return parser.parse_args()


def say(line: str) -> None:
    """Prints a line in one piece: under torchrun all ranks write to one pipe."""
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


class Job:
    """Model, optimizer, schedule and the number of steps done."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.manual_seed(5)
        layers: list[nn.Module] = []
        for index in range(2):
            with smp.partition(index * smp.pp_size() // 2):
                layers.append(
                    nn.Sequential(
                        nn.Linear(WIDTH, args.rows),
                        nn.Tanh(),
                        nn.Dropout(0.2),
                        nn.Linear(args.rows, WIDTH),
                    )
                )
        self.model = smp.DistributedModel(nn.Sequential(*layers))
        adam = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        scaled = {"init_scale": 2.0**20, "scale_window": 7}
        self.optimizer = smp.DistributedOptimizer(
            adam, dynamic_loss_scale=True, dynamic_loss_args=scaled
        )
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.9)
        self.step = 0
        self.handle: Any = None  # of a save in the background
        self.resume()

        @smp.step
        def train_step(x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).square().mean()
            self.model.backward(loss)
            return loss

        self.train_step = train_step

    def resume(self) -> None:
        newest = self.args.folder / "newest"
        if not newest.is_file():
            return
        content = smp.resume_from_checkpoint(self.args.folder)
        if content:
            self.schedule.load_state_dict(content["schedule"])
            self.step = content["step"]
        else:  # SMP_PREEMPTION_PATH saves none
            self.step = int(newest.read_text().removeprefix("preempted").removesuffix("_partial"))

    def content(self) -> dict[str, Any]:
        return {"step": self.step, "schedule": self.schedule.state_dict()}

    def save(self, tag: str, blocking: bool = True) -> None:
        self.handle = smp.save_checkpoint(
            self.args.folder,
            tag=tag,
            model=self.model,
            optimizer=self.optimizer,
            user_content=self.content(),
            num_kept_partial_checkpoints=2,
            blocking=blocking,
        )

    def train(self) -> None:
        generator = torch.Generator().manual_seed(self.step + 100 * smp.rdp_rank())
        loss = self.train_step(torch.randn(4, WIDTH, generator=generator)).reduce_mean()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        time.sleep(self.args.step_s * (1 + smp.rank()))  # ranks run apart
        self.step += 1
        say(f"STEP {self.step} {loss.item().hex()}")

    def hold(self) -> None:
        while self.args.hold and not self.args.hold.exists():
            time.sleep(0.005)

    def run(self) -> None:
        while self.step < self.args.steps:
            if self.step == self.args.steps - 5:
                self.hold()
            self.train()
            if self.args.save_each:
                self.save_each()
            if self.args.ask and smp.preemption_requested():
                self.save(f"asked{self.step}")
                smp.preemption.leave()

    def save_each(self) -> None:
        """Every other time in the background. Names come again: folders are replaced, too."""
        if self.handle is not None:
            self.handle.wait()
            say(f"SAVED {self.step - 1}")
        self.save(f"s{self.step % 3}", blocking=self.step % 2 == 0)
        if self.handle is None:
            say(f"SAVED {self.step}")

    def digest(self) -> str:
        """Computes a digest of all state that later steps use.

        The state consists of parameters, masters, moments and the loss scale.
        """
        state = self.optimizer.local_state_dict(gather_if_shard=False)["state"]
        tensors = [tensor for entry in state.values() for tensor in entry.values()]
        tensors += list(self.model.local_state_dict().values())
        found = hashlib.sha256(str(self.optimizer.loss_scale).encode())
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
        return found.hexdigest()


def main() -> None:
    args = parse()
    smp.init({"microbatches": 2, "auto_partition": False, "ddp": True, **args.config})
    job = Job(args)
    if not (args.ask or args.save_each or os.environ.get("SMP_PREEMPTION_PATH")):
        smp.preemption.save_to(args.folder, user_content=job.content, keep=2)
    say(f"BEGIN {job.step}")
    job.run()
    result = {"step": job.step, "rank": smp.rank(), "digest": job.digest()}
    say("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
