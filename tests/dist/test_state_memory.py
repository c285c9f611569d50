"""Ranks hold of parameters, gradients and optimizer state what the design page says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.pool import Pool
from tests.dist.processes import REPO, run_ranks

pytestmark = pytest.mark.alone

SCRIPT = REPO / "tests" / "dist" / "scripts" / "state_memory.py"
RANKS = 4
SHARDED = {
    "sharded_data_parallel_degree": RANKS,
    "sdp_param_persistence_threshold": 0,
    "delayed_parameter_initialization": True,
}
OPTIMIZER = {"shard_optimizer_state": True, "delayed_parameter_initialization": True}
# Configuration, ranks, and bytes per parameter of the model: parameters, gradients, optimizer state
# (two moments of Adam). With 16 bits parameters are there once more, as masters.
CASES = {
    "sharded-fp32": (SHARDED, RANKS, (4 / RANKS, 4 / RANKS, 8 / RANKS)),
    "sharded-bf16": ({**SHARDED, "bf16": True}, RANKS, (6 / RANKS, 4 / RANKS, 8 / RANKS)),
    "optimizer-fp32": (OPTIMIZER, RANKS, (4.0, 4 / RANKS, 8 / RANKS)),
    "optimizer-bf16": ({**OPTIMIZER, "bf16": True}, RANKS, (2 + 4 / RANKS, 4 / RANKS, 8 / RANKS)),
    "plain-bf16": ({"bf16": True}, 1, (6.0, 4.0, 8.0)),
}
LIVE_TOLERANCE = 0.05
RESIDENT_TOLERANCE, RESIDENT_SLACK = 0.15, 64 * 2**20


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("name", CASES)
def test_bytes_of_a_rank_are_those_of_the_table(pool: Pool, name: str, tmp_path: Path) -> None:
    config, num_ranks, per_parameter = CASES[name]
    argv = [json.dumps({"ddp": True, **config}), str(tmp_path)]
    for ended in run_ranks(pool, SCRIPT, num_ranks, argv):
        assert ended.returncode == 0, ended.output
    for rank in range(num_ranks):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        print(name, rank, told)
        assert told["numel"] > 1e8
        assert told["updated"] > 0.99 * told["numel"] * per_parameter[2] / 8, "nothing was trained"
        for kind, factor in zip(
            ("parameters", "gradients", "optimizer"), per_parameter, strict=True
        ):
            expected = factor * told["numel"]
            assert abs(told[kind] / expected - 1) <= LIVE_TOLERANCE, f"{kind} of rank {rank}"
        state = sum(per_parameter) * told["numel"]
        slack = RESIDENT_TOLERANCE * state + RESIDENT_SLACK
        assert len(told["grown"]) == 6  # in three steps, with gradients, before and after updates
        for grown in told["grown"]:
            assert abs(grown - state) <= slack, f"rank {rank}: {grown / state:.3f} of the state"
