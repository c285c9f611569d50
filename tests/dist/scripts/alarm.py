"""Ranks that are stopped, loop, leave or are ended by a signal; for tests of what the others say.

Usage: alarm.py ACTION VICTIM [--pp P] [--tp T] [--call C] [--step S]

Prints ``AT <monotonic time>`` where the test, or the victim itself, acts: `stop`, `loop`, `kill`,
`raise` and `exit` (sys.exit) in call C of a module of the victim; `slow`: it takes 1.2 s in the
six calls from C on; `leave` (sys.exit), `die` and
`throw` between two steps, before step S; `spawn` (all ranks): a worker of a DataLoader runs this
file again; `evaluate`: it computes alone before step S; `gloo-kill` and `gloo-raise`: where Gloo
connects, `hub`: before the ranks are connected at all.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import smp

MICROBATCHES, WIDTH, NUM_STEPS = 4, 8, 6
INIT_ACTIONS = ("gloo-kill", "gloo-raise", "hub")


def say_where() -> None:
    print(f"AT {time.monotonic()}", flush=True)


class Layer(torch.nn.Module):
    def __init__(self, action: str, faulty_call: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.action, self.faulty_call, self.num_calls = action, faulty_call, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += self.training
        if self.num_calls == self.faulty_call:
            self.misbehave()
        if self.action == "slow" and 0 <= self.num_calls - self.faulty_call < 6:
            time.sleep(1.2)
        return self.linear(x)

    def misbehave(self) -> None:
        if self.action in ("stop", "loop", "exit", "kill", "raise"):
            say_where()
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "raise":
            raise ZeroDivisionError("the layer broke")
        if self.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.action == "exit":
            sys.exit(3)
        while self.action == "loop":
            pass


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def evaluate(seconds: float) -> None:
    """Computes in layers that call each other, as models do."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for depth in range(20):
            evaluate_layer(torch.ones(64, 64), depth)


def evaluate_layer(x: torch.Tensor, depth: int) -> torch.Tensor:
    if depth:
        return evaluate_layer(x, depth - 1)
    return torch.sin(x @ x)


def break_init(action: str) -> None:
    """The victim fails while the ranks connect."""

    def fail(*_: object, **__: object) -> None:
        say_where()
        if action == "gloo-kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("the network broke")

    if action == "hub":
        smp._C.LivenessHub = fail
        return
    broken = type("Broken", (dist.ProcessGroupGloo,), {"__init__": fail})
    dist.ProcessGroupGloo = dist.distributed_c10d.ProcessGroupGloo = broken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action")
    parser.add_argument("victim", type=int)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--call", type=int, default=9)
    parser.add_argument("--step", type=int, default=2)
    args = parser.parse_args()
    if args.action == "init":
        say_where()
    if args.action == "init" and int(os.environ["RANK"]) != args.victim:
        time.sleep(3.0)  # the test ends the victim meanwhile
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            time.sleep(1000.0)  # never comes
    if int(os.environ["RANK"]) == args.victim and args.action in INIT_ACTIONS:
        break_init(args.action)
    smp.init(
        {
            "pipeline_parallel_degree": args.pp,
            "tensor_parallel_degree": args.tp,
            "microbatches": MICROBATCHES,
            "ddp": True,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    is_victim = smp.rank() == args.victim
    if args.action == "barrier" and smp.rank() != smp.size() - 1:
        say_where()
        smp.barrier()  # the last rank does not come
    if args.action == "barrier":
        time.sleep(1000.0)
    if args.action == "spawn":
        loader = DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn")
        print("SUM", sum(x.item() for x in loader), flush=True)
    layers = []
    for index in range(args.pp):
        with smp.partition(index):
            is_bad = is_victim and index == smp.pp_rank()
            layers.append(Layer(args.action if is_bad else "none", args.call))
    model = smp.DistributedModel(torch.nn.Sequential(*layers))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for step in range(NUM_STEPS):
        if step == args.step and is_victim and args.action in ("leave", "die", "throw"):
            say_where()
            if args.action == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if args.action == "throw":
                raise ZeroDivisionError("the script broke")
            sys.exit(3)
        if step == args.step and is_victim and args.action == "evaluate":
            evaluate(5.0)
        train_step(torch.randn(8, WIDTH))
        optimizer.step()
        optimizer.zero_grad()
    print("FINISHED", flush=True)


if __name__ == "__main__" or os.environ.get("ALARM_WITHOUT_GUARD"):
    main()
