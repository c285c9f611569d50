"""Two pipeline ranks measure what a step holds at most with checkpointing, beside what it should.

Usage: checkpoint_memory.py CASES FOLDER, under the allocation meter of the benchmarks; cases are
JSON, a list of strategies, "" for none. Every rank writes ``FOLDER/rank<i>.json``: for each case
the smallest peak of some steps above what was there before.

The library for matrix products keeps some MB in each thread that has ever called it, and how many
threads a rank needs depends on which messages come in time. So only steps count in which none of
them was the first of its thread.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import smp

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from allocation_meter import AllocationMeter  # noqa: E402

TOKENS, HIDDEN, BLOCKS, MICROBATCHES = 1024, 64, 8, 4
# Steps that count, and the most that are made for them.
LEARNING_STEPS, STEPS, MOST_STEPS = 2, 3, 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.first(x)).square().mean()  # type: ignore[no-any-return]


def measure(meter: AllocationMeter, strategy: str) -> int:
    """The smallest peak: a rank that is late keeps more."""
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "pipeline": "simple",
            "microbatches": MICROBATCHES,
            "auto_partition": False,
            "skip_tracing": True,
        }
    )
    plain = Model()
    for i, block in enumerate(plain.blocks):
        smp.set_partition(block, i * 2 // BLOCKS)
    model = smp.DistributedModel(plain)
    if strategy:
        smp.set_activation_checkpointing(plain.blocks, strategy=strategy)

    @smp.step
    def train(x: Tensor) -> None:
        model.backward(model(x))

    x = torch.randn(MICROBATCHES * TOKENS, HIDDEN)
    peaks: list[int] = []
    for step in range(MOST_STEPS):
        model.zero_grad(set_to_none=True)
        gc.collect()
        smp.barrier()
        live, workspace = meter.restart(), meter.workspace()
        train(x)
        if step >= LEARNING_STEPS and meter.workspace() == workspace:
            peaks.append(meter.peak() - live)
        if all(smp.allgather(len(peaks) >= STEPS, smp.WORLD)):
            break
    smp.shutdown()
    assert len(peaks) >= STEPS, f"{len(peaks)} of {MOST_STEPS} steps without a new thread"
    return min(peaks)


def main() -> None:
    torch.set_num_threads(1)
    meter = AllocationMeter()
    peaks = [measure(meter, strategy) for strategy in json.loads(sys.argv[1])]
    (Path(sys.argv[2]) / f"rank{os.environ['RANK']}.json").write_text(json.dumps(peaks))


if __name__ == "__main__":
    main()
