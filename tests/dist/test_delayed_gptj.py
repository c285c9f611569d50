"""A model that does not fit is built, traced and partitioned, and a stage of one is made."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.dist.processes import REPO, launch

pytestmark = pytest.mark.alone

SCRIPT = REPO / "tests" / "dist" / "scripts" / "delayed_gptj.py"
MOST_BYTES = 10**9
# Measured: 1.2. One with as many layers and a hundredth of the parameters, in the same process.
MOST_TIMES_A_NARROW_ONE = 3.0
SLACK_BYTES = 64 * 2**20


@pytest.mark.sample(keep=0)
def test_six_billion_parameters_are_planned_without_memory(tmp_path: Path) -> None:
    path = tmp_path / "told.json"
    done = launch([sys.executable, str(SCRIPT), str(path)])
    assert done.returncode == 0, done.stdout
    told = json.loads(path.read_text())
    print(told)
    assert told["parameters"] > 6e9 and told["on_meta"] and told["stages"] == 8
    assert told["peak_bytes"] < MOST_BYTES
    narrow_s = sum(told["narrow_seconds"].values())
    assert sum(told["seconds"].values()) < MOST_TIMES_A_NARROW_ONE * narrow_s
    assert told["of_stage"] / 8 <= told["held"] < 1.001 * told["of_stage"] / 8

    made, wanted = told["made"]
    assert 0 < made == wanted
    assert told["stage_bytes"] < told["model_bytes"] / 4, "a stage would say nothing"
    assert told["grown_bytes"] < 1.15 * told["stage_bytes"] + SLACK_BYTES
