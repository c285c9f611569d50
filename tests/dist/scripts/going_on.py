"""Trains a small model while ranks are lost; for tests of ``on_failure="shrink"``.

Prints ``STEP <step> <losses of the microbatches>`` and at the end ``RESULT <json>``, floats in
hexadecimal. The data depend on the step and the replica at the start alone.

``--die RANK:PLACE:STEP`` (several times) ends a rank in step STEP, counted from 0: in the forward
or backward of its module (``forward``, ``backward``), before or after gradients are summed
(``sum``, ``summed``), before the ranks exchange copies (``exchange``), before or after they confirm
the step (``confirm``, ``confirmed``), before a barrier of the script (``barrier``), before the norm
of the gradients is computed (``clip``), in the update (``optimizer``), after it (``between``);
``raise`` raises an exception in the forward, ``stop`` stops the process there; ``resize`` dies when
it is told that others have died, and ``connect``, ``connected``, ``torch``, ``torched``, ``join``
and ``joined`` before or after it connects to those that are left, makes groups of torch and lays
out models with them. A process that takes a place dies when it has entered it (``entered``), when
it has built its model (``built``), or when it has the state (``taken``), whatever the step. RANK
``spare`` is the process that waits and is the first to take a place. It prints ``AT <monotonic
time>`` before.

``--term RANK:PLACE:STEP`` sends SIGTERM to a rank there. With ``--leave FOLDER`` the script begins
with the newest checkpoint there, if there is one; ranks that are asked to stop save one.

SIGUSR1 raises an exception wherever the script is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import smp
from smp.checkpoint import archive
from smp.model.engine import Engine
from smp.model.gradients import GradientReduction
from smp.step import copy_memory
from smp.step.copies import Copies
from smp.world import runtime, survivor_agreement
from smp.world.connections import Connections
from smp.world.process_groups import TorchGroups
from smp.world.survivors import Survivors

ROWS = 4
fast_write = archive.write


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=json.loads, default={})
    parser.add_argument("--term", action="append", default=[])
    parser.add_argument("--leave", type=Path, help="folder of checkpoints")
    parser.add_argument("--saves", default="script", help="who saves there: script or library")
    parser.add_argument("--layers", type=int, default=0, help="one for each stage by default")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--die", action="append", default=[])
    parser.add_argument("--resume", type=Path, help="folder of the checkpoint to begin with")
    parser.add_argument("--save", type=Path, help="folder of a checkpoint after the last step")
    parser.add_argument("--reads", default="", help="replicas of the first job, by replica")
    parser.add_argument("--save-each", type=Path, help="folder of saves in the background")
    parser.add_argument("--slow-save", type=int, default=-1, help="step whose save takes seconds")
    parser.add_argument("--slow-saves", action="store_true", help="each save takes a while")
    parser.add_argument("--twice", action="store_true", help="has two steps for each update")
    parser.add_argument("--step-s", type=float, default=0.0, help="time between two steps")
    parser.add_argument("--barrier", action="store_true", help="has a barrier between steps")
    parser.add_argument("--calls", action="store_true", help="communicates after the norm")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--norm", action="store_true", help="adds running statistics")
    parser.add_argument("--misuse", default="", help="how the script is wrong, see the tests")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--scale", type=float, help="first loss scale, which follows overflows")
    parser.add_argument("--unclipped", action="store_true", help="has no norm of gradients")
    parser.add_argument("--early", action="store_true", help="drops gradients before each step")
    parser.add_argument("--double", action="store_true", help="computes in FP64")
    parser.add_argument("--by-place", action="store_true", help="data depend on the present place")
    parser.add_argument("--first-reads", default="", help="places that data of the first step have")
    parser.add_argument("--until", type=int, default=0, help="trains on until there are such ranks")
    parser.add_argument("--never-silent", action="store_true", help="waits for silent ranks")
    return parser.parse_args()


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def is_first_to_take_a_place(number: int) -> bool:
    if number < int(os.environ["SMP_WORLD_SIZE"]):
        return False
    try:
        Path(os.environ["SMP_RENDEZVOUS"].removeprefix("file://") + ".first_spare").touch(
            exist_ok=False
        )
    except FileExistsError:
        return False
    return True


def die(number: int = signal.SIGKILL) -> None:
    say(f"AT {time.monotonic()}")
    os.kill(os.getpid(), number)


def raise_anywhere(*_: Any) -> None:
    raise ZeroDivisionError("the script broke")


def slow_write(*args: Any, **options: Any) -> Any:
    time.sleep(2.0)
    return fast_write(*args, **options)


def slower_write(*args: Any, **options: Any) -> Any:
    time.sleep(0.3)
    return fast_write(*args, **options)


class Spring(torch.autograd.Function):
    """Identity whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, at_backward: Callable[[], None]) -> torch.Tensor:
        ctx.at_backward = at_backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.at_backward()
        return grad, None


class Layer(nn.Module):
    def __init__(self, job: Job, is_own: bool) -> None:
        super().__init__()
        width = job.args.width
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if job.args.norm else nn.Identity()
        self.dropout = nn.Dropout(job.args.dropout)
        self.job, self.is_own = [job], is_own  # in a list, which is no submodule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        job = self.job[0]
        if self.is_own and not smp.is_tracing():
            job.at("forward")
            job.at("raise")
            job.at("stop")
        x = self.dropout(torch.tanh(self.norm(self.linear(x))))
        return Spring.apply(x, lambda: job.at("backward")) if self.is_own else x


class Job:
    present: Job

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.step = args, 0
        Job.present = self  # also while it takes a place
        self.place, self.fatal_step, self.signal = "", -1, signal.SIGKILL
        # The number of a process that waits is no rank.
        number = int(os.environ.get("SMP_RANK") or os.environ.get("RANK") or smp.rank())
        for text in args.die:
            rank, place, step = text.split(":")
            if is_first_to_take_a_place(number) if rank == "spare" else int(rank) == number:
                self.place, self.fatal_step = place, int(step)
        for text in args.term:
            rank, place, step = text.split(":")
            if int(rank) == number:
                self.place, self.fatal_step, self.signal = place, int(step), signal.SIGTERM
        newcomer, launched = runtime.current().newcomer, runtime.current().launched
        say(f"NUMBER {newcomer.number if newcomer else launched[smp.rank()]}")
        self.at("entered")
        reads = [int(r) for r in args.reads.split(",")] if args.reads else range(smp.rdp_size())
        self.first_replica = reads[smp.rdp_rank()]
        self.end: int | None = args.steps
        torch.manual_seed(5)
        torch.set_default_dtype(torch.float64 if args.double else torch.float32)
        layers: list[nn.Module] = []
        num_layers = args.layers or smp.pp_size()
        for index in range(num_layers):
            stage = index * smp.pp_size() // num_layers
            with smp.partition(stage), smp.tensor_parallelism(smp.tp_size() > 1):
                layers.append(Layer(self, stage == smp.pp_rank()))
        self.model = smp.DistributedModel(nn.Sequential(*layers))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), 0.01)
        if args.misuse == "whole":
            matrices = [p for p in self.model.parameters() if p.ndim == 2]
            self.optimizer = torch.optim.Muon(matrices, 0.01)
        if args.misuse != "plain":
            options = {"init_scale": args.scale} if args.scale else None
            self.optimizer = smp.DistributedOptimizer(
                self.optimizer, dynamic_loss_scale=bool(args.scale), dynamic_loss_args=options
            )
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        content = None
        if args.resume is not None:
            resumed = smp.resume_from_checkpoint(args.resume)
            self.step = resumed["step"]
            self.schedule.load_state_dict(resumed["schedule"])
        self.first_step = self.step
        if smp.state.cfg.on_failure == "spare":
            smp.barrier()  # returns at once in a process that takes a place
            if args.misuse == "gather":
                smp.allgather(1, smp.WORLD)
            self.at("built")
            give = (lambda: {}) if args.misuse == "same" else self.content
            content = None if args.misuse == "late" else smp.take_over(give)
            if content is not None:
                self.step = content["step"]
                self.schedule.load_state_dict(content["schedule"])
                say(f"TAKEN {smp.rank()} {self.step} {time.monotonic()}")
                self.find_end()
                self.at("taken")
        if args.leave is not None and args.saves == "library":
            smp.preemption.save_to(args.leave, user_content=self.content)
        if args.leave is not None and (args.leave / "newest").exists() and content is None:
            content = smp.resume_from_checkpoint(args.leave)
            self.step = content["step"]
            self.schedule.load_state_dict(content["schedule"])
            say(f"RESUMED {self.step}")
        self.resized: list[dict[str, Any]] = []
        self.save: Any = None  # the save in the background
        if smp.state.cfg.on_failure != "end":
            smp.on_resize(self.note)
        self.optimizer.register_step_pre_hook(lambda *_: self.at("optimizer"))

        @smp.step(detach_outputs=args.misuse != "graph")
        def train_step(x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).square().mean()
            self.model.backward(loss)
            return loss

        self.train_step = train_step

    def content(self) -> dict[str, Any]:
        return {"step": self.step, "schedule": self.schedule.state_dict()}

    def note(self, resized: Any) -> None:
        assert (smp.dp_size(), smp.size()) == (resized.dp_size, len(smp.get_world_group()))
        self.resized.append(
            {
                "step": self.step,
                "sizes": [resized.dp_size_before, resized.dp_size],
                "lost": resized.lost,
                "newcomers": resized.newcomers,
            }
        )
        self.find_end()
        say(f"RESIZED {time.monotonic()} {json.dumps(resized.seconds)}")
        self.at("resize")

    def find_end(self) -> None:
        """Finds the last step, which is equal on all ranks, from the ranks that there are now."""
        if self.args.until:
            is_full = smp.size() >= self.args.until
            self.end = max(self.args.steps, self.step + 3) if is_full else None

    @property
    def replica(self) -> int:
        if not self.args.by_place:
            return self.first_replica
        if self.args.first_reads and self.step == self.first_step:
            return int(self.args.first_reads.split(",")[smp.rdp_rank()])
        return smp.rdp_rank()

    def at(self, place: str) -> None:
        is_joining = place in ("entered", "built", "taken")
        if place != self.place or not (is_joining or self.step == self.fatal_step):
            return
        self.fatal_step = -1  # a stopped process may come to a further microbatch
        if place == "raise":
            say(f"AT {time.monotonic()}")
            raise ZeroDivisionError("the layer broke")
        die(signal.SIGSTOP if place == "stop" else self.signal)

    def train(self) -> None:
        generator = torch.Generator().manual_seed(self.step + 100 * self.replica)
        x = torch.randn(ROWS, self.args.width, generator=generator)
        if self.args.early:
            self.optimizer.zero_grad()
        if self.args.twice:
            self.train_step(x + 1)
        losses = self.train_step(x).outputs
        self.at("barrier")
        if self.args.barrier:
            smp.barrier()
        self.at("clip")
        if not self.args.unclipped:
            smp.clip_grad_norm_(self.model.parameters(), 0.05)
        if self.args.calls:
            if smp.pp_size() == 1:
                with torch.no_grad():
                    self.model(x)
            smp.barrier()
            assert smp.allgather(self.step, smp.WORLD) == [self.step] * smp.size()
            assert not smp.preemption_requested()
        self.optimizer.step()
        if self.args.misuse == "reads":
            self.model.zero_grad()
        if not self.args.early:
            self.optimizer.zero_grad()
        self.schedule.step()
        if self.args.scale and self.optimizer.step_was_skipped:
            say(f"SKIPPED {self.step}")
        say(f"STEP {self.step} {' '.join(loss.item().hex() for loss in losses)}")
        say(f"DONE {self.step} {time.monotonic()}")
        self.at("between")
        self.step += 1
        time.sleep(self.args.step_s)

    def run(self) -> None:
        while self.end is None or self.step < self.end:
            self.train()
            if self.args.save_each is not None:
                self.save_in_background()
            by_script = self.args.leave is not None and self.args.saves == "script"
            if by_script and smp.preemption_requested():
                self.save_now(self.args.leave, f"step{self.step}")
                say(f"LEFT {self.step}")
                smp.preemption.leave()
        if self.args.save is not None:
            self.save_now(self.args.save, "saved")

    def save_now(self, folder: Path, tag: str) -> None:
        smp.save_checkpoint(
            folder,
            tag=tag,
            model=self.model,
            optimizer=self.optimizer,
            user_content=self.content(),
        )

    def save_in_background(self) -> None:
        try:
            if self.save is not None:
                self.save.wait()
        except RuntimeError as error:
            say(f"UNSAVED {self.step - 1} {error}")
        usual = slower_write if self.args.slow_saves else fast_write
        archive.write = slow_write if self.step == self.args.slow_save else usual
        self.save = smp.save_checkpoint(
            self.args.save_each,
            tag=f"after{self.step}",
            model=self.model,
            optimizer=self.optimizer,
            user_content=self.content(),
            blocking=False,
        )

    def digest(self) -> str:
        state = self.optimizer.local_state_dict(gather_if_shard=False)["state"]
        tensors = [tensor for entry in state.values() for tensor in entry.values()]
        tensors += list(self.model.local_state_dict().values())
        found = hashlib.sha256()
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
        return found.hexdigest()


def die_around(method: str, owner: type, before: str, after: str) -> None:
    own = getattr(owner, method)

    def around(self: Any, *args: Any, **options: Any) -> Any:
        Job.present.at(before)
        result = own(self, *args, **options)
        Job.present.at(after)
        return result

    setattr(owner, method, around)


def main() -> None:
    args = parse()
    smp.init({"microbatches": 2, "auto_partition": False, "ddp": True, **args.config})
    if args.never_silent:
        survivor_agreement.SILENT_S = float("inf")
    if args.misuse == "apart":
        copy_memory._File.open = staticmethod(lambda *_: None)
    die_around("end_step", GradientReduction, "sum", "summed")
    die_around("exchange", Copies, "exchange", "exchanged")
    die_around("confirm", Survivors, "confirm", "confirmed")
    die_around("connect", Connections, "connect", "connected")
    die_around("make", TorchGroups, "torch", "torched")
    die_around("join_groups", Engine, "join", "joined")
    job = Job(args)
    signal.signal(signal.SIGUSR1, raise_anywhere)
    job.run()
    result = {
        "step": job.step,
        "rank": smp.rank(),
        "sizes": [smp.pp_size(), smp.tp_size(), smp.dp_size()],
        "resized": job.resized,
        "rate": job.optimizer.param_groups[0]["lr"],
        "digest": job.digest(),
        "moments": sum(entry["exp_avg"].numel() for entry in job.optimizer.state.values()),
    }
    say("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
