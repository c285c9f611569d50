"""A rank that loads a model by ``smp.auto`` needs memory for its own part."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.dist.processes import REPO, launch

pytestmark = pytest.mark.alone

SCRIPT = REPO / "tests" / "dist" / "scripts" / "auto_memory.py"
SLACK_BYTES = 64 * 2**20  # of allocators, threads and measurements
UPDATE_BYTES = 64 * 2**20  # torch's AdamW makes tensors as large as the largest parameter
USABLE = 0.9  # share of the free memory that a plan counts with


@pytest.mark.sample(keep=0)
def test_a_rank_loads_its_own_part_alone(tmp_path: Path) -> None:
    done = launch([sys.executable, str(SCRIPT), str(tmp_path)])
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        print(f"rank {rank}: {told}")
        part = told["part"]
        assert 0.4 * told["whole"] < part < 0.6 * told["whole"]
        # Sums of gradients take memory in the first backward.
        assert part < told["loaded"] < 1.1 * part + SLACK_BYTES < told["whole"]
        assert told["plan"] > 4 * part, "parameters, gradients and Adam's moments"
        most = told["plan"] / USABLE + SLACK_BYTES + UPDATE_BYTES
        assert told["trained"] < most < 4 * told["whole"]
