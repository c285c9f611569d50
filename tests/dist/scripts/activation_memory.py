"""Ranks of one pipeline measure what a step holds at most, beside what the simulator says.

Usage: activation_memory.py CASES FOLDER, under the allocation meter of the benchmarks; cases are
JSON, a list of ``[schedule, microbatches, active_microbatches or null]``. Every rank writes
``FOLDER/rank<i>.json``: for each case the simulator's number of activations, and the peaks of the
steps above what was there before, as ratios to the bytes of so many activations.

Stages take the same time on all ranks, by sleeping, so that a busy machine seldom changes the order
of their tasks. Where it does, a rank holds what came too early for it: steps are repeated until
each rank had one whose peak is near to the simulator's, or until there were many.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

import smp
from smp.pipeline.schedules import Stage, simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from allocation_meter import AllocationMeter  # noqa: E402

TOKENS, HIDDEN, VOCABULARY, BLOCKS_PER_RANK = 1024, 64, 1024, 2
FORWARD_S, BACKWARD_S = 0.02, 0.035
TOLERANCE = 0.1
LEARNING_STEPS, MOST_STEPS = 2, 20  # the first steps learn what comes


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(BACKWARD_S)
        return grads[0]


class Block(nn.Module):
    def __init__(self, pauses: bool) -> None:
        super().__init__()
        self.pauses = pauses
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        if self.pauses:
            x = Pause.apply(x)
        return x + self.down(functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(
            Block(i == 0) for _ in range(num_ranks) for i in range(BLOCKS_PER_RANK)
        )
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def run(self, x: Tensor, blocks: range, targets: Tensor | None) -> Tensor:
        """Runs a range of blocks, and computes the loss if there are targets."""
        for i in blocks:
            x = self.blocks[i](x)
        return x if targets is None else functional.cross_entropy(self.head(x), targets)

    def forward(self, ids: Tensor) -> Tensor:
        return self.run(self.embedding(ids), range(len(self.blocks)), ids)


def measure_stage(meter: AllocationMeter, rank: int, num_ranks: int) -> tuple[int, int]:
    """Measures one microbatch of this rank's part alone, in the second of two runs.

    Returns:
        the bytes that its backward needs, and the largest number of bytes at once.
    """
    model = Model(num_ranks)
    blocks = range(rank * BLOCKS_PER_RANK, (rank + 1) * BLOCKS_PER_RANK)
    ids = torch.zeros(TOKENS, dtype=torch.long)
    kept = top = 0
    for _ in range(2):  # gradients of parameters are new in the first one only
        live = meter.restart()
        x = model.embedding(ids) if rank == 0 else torch.randn(TOKENS, HIDDEN, requires_grad=True)
        out = model.run(x, blocks, ids if rank == num_ranks - 1 else None)
        shape, edge = out.shape, get_gradient_edge(out)
        del x, out
        kept = meter.live() - live
        torch.autograd.backward((edge,), (torch.ones(shape),))
        top = meter.peak() - live
        del edge
    return kept, top


def measure_steps(
    meter: AllocationMeter,
    schedule: str,
    microbatches: int,
    active: int | None,
    num_ranks: int,
    expected: int,
) -> list[float]:
    """Peaks of the steps on this rank, above what was there before, as ratios to ``expected``."""
    config: dict[str, Any] = {
        "pipeline_parallel_degree": num_ranks,
        "pipeline": schedule,
        "microbatches": microbatches,
        "auto_partition": False,
        "default_partition": 0,
        "skip_tracing": True,
    }
    smp.init(config | ({} if active is None else {"active_microbatches": active}))
    plain = Model(num_ranks)
    for i, block in enumerate(plain.blocks):
        smp.set_partition(block, i // BLOCKS_PER_RANK)
    smp.set_partition(plain.head, num_ranks - 1)
    model = smp.DistributedModel(plain)

    @smp.step
    def train(ids: Tensor) -> None:
        model.backward(model(ids))

    ids = torch.randint(VOCABULARY, (microbatches * TOKENS,))
    ratios = []
    for step in range(LEARNING_STEPS + MOST_STEPS):
        model.zero_grad(set_to_none=True)
        gc.collect()
        smp.barrier()
        live = meter.restart()
        train(ids)
        if step >= LEARNING_STEPS:
            ratios.append((meter.peak() - live) / expected)
            near = min(abs(ratio - 1) for ratio in ratios) <= TOLERANCE
            if all(smp.allgather(near, smp.WORLD)):
                break
    smp.shutdown()
    return ratios


def main() -> None:
    torch.set_num_threads(1)
    meter = AllocationMeter()
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kept, top = measure_stage(meter, rank, num_ranks)
    results = []
    for schedule, microbatches, active in json.loads(sys.argv[1]):
        simulation = simulate(
            [Stage(r, FORWARD_S * 1e3, BACKWARD_S * 1e3, 0.0, 0) for r in range(num_ranks)],
            microbatches,
            schedule,
            active_microbatches=active,
        )
        count = simulation.ranks[rank].peak_activations
        expected = (count - 1) * kept + top
        ratios = measure_steps(meter, schedule, microbatches, active, num_ranks, expected)
        results.append({"rank": rank, "count": count, "ratios": ratios})
    (Path(sys.argv[2]) / f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
