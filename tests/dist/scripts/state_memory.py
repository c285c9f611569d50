"""Ranks measure what they hold of the state of a model of 100 million parameters.

Usage: state_memory.py CASE FOLDER; a case is JSON, the configuration of `smp.init`. Every rank
writes ``FOLDER/rank<i>.json``: bytes of live storages of parameters, gradients and optimizer state;
what the resident memory of the process has grown by since before the model was made, after each of
some training steps and after each of their updates; the number of parameters, and of those of them
that were updated here.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import smp

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from state_bytes import state_bytes  # noqa: E402

WIDTH, NUM_LAYERS = 2048, 24  # 100.7 million parameters
NUM_STEPS = 4


class Stack(nn.Module):
    """Layers whose number of elements four ranks share unevenly, because of the biases."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH - 1) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.pad(torch.tanh(layer(x)), (0, 1))
        return x.square().mean()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    torch.set_num_threads(1)
    smp.init(json.loads(sys.argv[1]))
    torch.manual_seed(1)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # so that what was free before cannot hide what grows
    before = resident_bytes()
    with smp.model_creation():
        stack = Stack()
    numel = sum(p.numel() for p in stack.parameters())
    model = smp.DistributedModel(stack)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))

    @smp.step
    def train(x: Tensor) -> Tensor:
        loss = model(x)
        model.backward(loss)
        return loss

    x = torch.randn(2, WIDTH)
    grown = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        train(x)
        after_step = resident_bytes() - before
        optimizer.step()
        if step > 0:
            grown += [after_step, resident_bytes() - before]
    held = state_bytes(model, optimizer)
    result = {
        "numel": numel,
        "updated": sum(int(m["exp_avg"].count_nonzero()) for m in optimizer.state.values()),
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        "grown": grown,
    }
    Path(sys.argv[2], f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
    smp.shutdown()


if __name__ == "__main__":
    main()
