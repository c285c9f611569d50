"""Out of memory on one of several ranks: its error, and settings with which it fits."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from torch import nn

from tests.dist.pool import Pool
from tests.harness import train_step_of
from tests.host_limit import host_memory

WIDTH, SAMPLES, NUM_LAYERS = 512, 8192, 8


def train_pipeline(rank: int, limits_mb: tuple[int, int], keys: dict[str, Any]) -> str:
    """Two steps over two pipeline ranks; the text of the error of a rank that has one."""
    import smp

    os.environ["SMP_CHECK_FIRST_STEP"] = "0"  # needs memory of its own
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True, **keys})
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)]
    model = smp.DistributedModel(nn.Sequential(*layers))
    train_step = train_step_of(model)
    with host_memory(limits_mb[rank]):
        for _ in range(2):
            train_step(torch.ones(SAMPLES, WIDTH))
    return "fits"


@pytest.mark.sample(keep=0)
def test_rank_of_a_pipeline_says_what_was_expected_and_fewer_in_flight_fit(
    pool: Pool,
) -> None:
    keys = {"active_microbatches": 4, "pipeline": "simple"}
    limits = (70, 4096)
    outcomes = pool.outcomes(2, train_pipeline, limits, keys)
    assert [outcome.error for outcome in outcomes] == ["OutOfMemory", "PeerFailure"]
    text = outcomes[0].message
    assert re.search(r"^\[global_rank 0 \| pp 0 tp 0 rdp 0\] out of memory in step ", text), text
    assert re.search(
        r"the partition expected at most .*, 4 microbatches in flight of \d+\.\d MiB each", text
    ), text
    assert "global_rank 0 (pp 0 tp 0 rdp 0) raised" in outcomes[1].message
    fewer = keys | {"active_microbatches": 1}
    assert pool.run(2, train_pipeline, limits, fewer) == ["fits", "fits"]


def train_replicas(rank: int, limit_mb: int, keys: dict[str, Any]) -> str:
    """Two steps of two replicas whose state is what is large."""
    import smp

    smp.init({"microbatches": 1, "ddp": True, **keys})
    torch.manual_seed(1)
    model = smp.DistributedModel(nn.Sequential(*(nn.Linear(1536, 1536) for _ in range(4))))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    train_step = train_step_of(model)
    with host_memory(limit_mb):
        for _ in range(2):
            train_step(torch.ones(4, 1536))
            optimizer.step()
            optimizer.zero_grad()
    return "fits"


def test_replicas_without_room_for_state_say_so_and_fit_if_they_share_it(
    pool: Pool,
) -> None:
    """Parameters of 36 MiB, and twice as many of state; gradients are in pages of their own."""
    limit_mb = 100
    outcomes = pool.outcomes(2, train_replicas, limit_mb, {})
    texts = [o.message for o in outcomes if o.error == "OutOfMemory"]
    assert texts, [o.message for o in outcomes]
    assert "out of memory in the update of the optimizer: 9.0 MiB was asked for" in texts[0]
    held = dict(re.findall(r"^  ([a-z ]+): (\d+)\.\d MiB", texts[0], re.M))
    assert held["parameters"] == held["gradients"] == "36", texts[0]
    assert pool.run(2, train_replicas, limit_mb, {"shard_optimizer_state": True}) == ["fits"] * 2
