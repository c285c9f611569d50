"""Trains the model of tests/dist/scripts/going_on.py with torchft; a rank dies. For going_on.py.

Each rank is a replica. Prints ``AT <time>`` before the death and ``DONE <step> <time>`` after each
step whose update torchft has committed.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore

WIDTH, ROWS = 8, 4


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


class Spring(torch.autograd.Function):
    """Identity whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, at_backward: Any) -> torch.Tensor:
        ctx.at_backward = at_backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.at_backward()
        return grad, None


def main() -> None:
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    parser = argparse.ArgumentParser()
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--meet", type=Path, required=True, help="folder in which ranks meet")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--die", default="", help="RANK:PLACE:STEP; forward, backward or optimizer")
    args = parser.parse_args()
    number, replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    victim, place, fatal_step = (args.die or "-1::-1").split(":")
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    plain = torch.optim.AdamW(model.parameters(), 0.01)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        replica_id=f"replica{number}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=args.lighthouse,
        timeout=timedelta(seconds=30),
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, plain)

    def at(here: str) -> None:
        step = manager.current_step()
        is_complete = manager.num_participants() == replicas  # all take part before the death
        if (number, here) == (int(victim), place) and step >= int(fatal_step) and is_complete:
            say(f"AT {time.monotonic()}")
            os.kill(os.getpid(), signal.SIGKILL)

    (args.meet / str(number)).touch()  # the first quorum is to have all ranks
    while len(list(args.meet.iterdir())) < replicas:
        time.sleep(0.01)
    while manager.current_step() < args.steps:
        step = manager.current_step()
        optimizer.zero_grad()
        x = torch.randn(ROWS, WIDTH)
        at("forward")
        loss = Spring.apply(wrapped(x), lambda: at("backward")).square().mean()
        loss.backward()
        at("optimizer")
        optimizer.step()
        if manager.current_step() > step:
            say(f"DONE {step} {time.monotonic()} {manager.num_participants()}")
    manager.shutdown()


if __name__ == "__main__":
    main()
