"""A thousand steps leave nothing behind: no memory, threads, files, objects or records."""

from __future__ import annotations

import gc
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool
from tests.harness import forward_step, own_loss, train_step_of
from tests.reference.boundary import (
    WIDTH,
    InPlaceOnResults,
    RecomputedAtTheCaller,
    UnusedOutputsAndArguments,
)
from tests.reference.models import Place, randomise_

WARM_UP = 200
STEPS = 1000
MAX_GROWTH_BYTES = 4 * 2**20
# Caches and threads that are still new bring some. One object per training step would be 600.
MAX_NEW_OBJECTS = 300
# A context that waits while another begins takes a thread more; they are kept and used again, and
# how many are needed at once depends on timing.
MAX_NEW_THREADS = 4


class Everything(nn.Module):
    """Results without a use, recomputation, writes into results, dropout; one path for each."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.rules = nn.ModuleList(
            rule(place)
            for rule in (UnusedOutputsAndArguments, RecomputedAtTheCaller, InPlaceOnResults)
        )
        with place(1):
            self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(x)
        return torch.stack([rule(x) for rule in self.rules]).sum()


@dataclass
class Sample:
    """Holds the resources of one process."""

    rss_bytes: int
    threads: int
    files: int
    objects: Counter[str]
    stats: dict[str, float]


def sample() -> Sample:
    import smp

    gc.collect()
    status = Path("/proc/self/status").read_text()
    threads = int(status.split("Threads:")[1].split()[0])
    kinds = Counter(type(obj).__name__ for obj in gc.get_objects())
    return Sample(
        rss_bytes=smp.metrics.resident_bytes(),
        threads=threads,
        files=len(os.listdir("/proc/self/fd")),
        objects=kinds,
        stats=smp.metrics.server_stats(),
    )


def run_long(rank: int) -> tuple[Sample, Sample, list[float]]:
    import smp

    torch.manual_seed(4)
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": 2,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    model: Any = smp.DistributedModel(randomise_(Everything(smp.partition), 3).train())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    train = train_step_of(model, own_loss)
    evaluate = forward_step(model)
    losses = []
    generator = torch.Generator().manual_seed(9)
    for step in range(STEPS):
        if step == WARM_UP:
            before = sample()
        # Shapes seen before, in turn; every fourth step has no backward.
        x = torch.randn(4 + 2 * (step % 3), WIDTH, generator=generator, dtype=torch.float64)
        if step % 4 == 3:
            with torch.no_grad():
                evaluate(x)
            continue
        losses.append(float(train(x).reduce_mean()))
        optimizer.step()
        optimizer.zero_grad()
    return before, sample(), losses


@pytest.mark.sample(keep=0)
def test_a_thousand_steps_leave_nothing_behind(pool: Pool) -> None:
    # The rings of shared memory count as resident once all their pages were used: small ones, which
    # is soon.
    results = pool.run(2, run_long, env={"SMP_SHM_RING_MB": "1"})
    for rank, (before, after, losses) in enumerate(results):
        assert len(losses) == STEPS * 3 // 4 and losses[-1] != losses[-2]
        growth = after.rss_bytes - before.rss_bytes
        new = after.objects - before.objects
        print(
            f"rank {rank}: {growth / 1024:+.0f} KiB, threads {after.threads}, "
            f"files {after.files}, objects {sum(new.values()):+d}"
        )
        assert growth < MAX_GROWTH_BYTES, f"rank {rank} grew by {growth} bytes"
        assert after.threads <= before.threads + MAX_NEW_THREADS, f"rank {rank}: threads"
        assert after.files == before.files, f"rank {rank}: open files"
        assert sum(new.values()) < MAX_NEW_OBJECTS, f"rank {rank}: {new.most_common(5)}"
        assert before.stats["records"] == after.stats["records"] == 0
        assert after.stats["contexts"] > before.stats["contexts"]
