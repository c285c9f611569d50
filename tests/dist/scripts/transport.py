"""Ranks of one pipeline; one of them is killed in a step while large messages are under way.

Usage: transport.py VICTIM

Every rank prints ``MEMORY <device>:<inode>`` for each piece of memory it shares with others, as the
system lists it, and ``SHM <names>``: what is in /dev/shm.
"""

from __future__ import annotations

import os
import signal
import sys

import torch

import smp


class Layer(torch.nn.Module):
    def __init__(self, dies: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.dies = dies
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.dies and self.calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.linear(x)


def main() -> None:
    victim = int(sys.argv[1])
    smp.init({"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0})
    for line in open("/proc/self/maps", encoding="ascii"):
        if "memfd:smp-rings" in line:
            print(f"MEMORY {line.split()[3]}:{line.split()[4]}", flush=True)
    print("SHM", *sorted(os.listdir("/dev/shm")), flush=True)
    layers = []
    for index in range(2):
        with smp.partition(index):
            layers.append(Layer(index == victim == smp.pp_rank()))
    model = smp.DistributedModel(torch.nn.Sequential(*layers))

    @smp.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for _ in range(4):
        train_step(torch.randn(1 << 20, 4))  # twice the ring
    print("FINISHED", flush=True)


if __name__ == "__main__":
    main()
