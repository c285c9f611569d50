"""The benchmark of the hub speaks as ranks do, and counts what the hub says."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import REPO
from tests.installed import python_path
from tests.patience import PATIENCE_S

N = 12


@pytest.mark.sample(keep=0)
def test_the_hub_answers_simulated_ranks() -> None:
    done = subprocess.run(
        [sys.executable, "control_plane.py", "--ranks", str(N), "--seconds", "1"],
        env={**os.environ, "PYTHONPATH": python_path()},
        cwd=REPO / "benchmarks",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["num_ranks"] == N
    assert found["join"]["to_hub"] == N and found["join"]["from_hub"] >= N
    assert found["steady"]["to_hub"] == N
    assert found["stop"]["to_hub"] == N + 1 and found["stop"]["from_hub"] >= 2 * N
    assert found["fault"]["to_hub"] == 1 and found["fault"]["from_hub"] >= N - 1
    assert found["leave"]["to_hub"] == N
    assert N <= found["leave"]["from_hub"] < 6 * N, "goodbyes grow with the ranks, not their pairs"
    # The clock of a process may have moved in one of them only.
    assert sum(found[phase]["hub_cpu_s"] for phase in ("join", "steady", "leave")) > 0
