"""Whenever a job is killed that saves to a store, the newest complete checkpoint loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.unit import s3_server

_PROGRAM = Path(__file__).with_name("store_crash.py")


@pytest.mark.sample(keep=2)
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "mode", "count"),
    [
        ("file", "everywhere", 3),
        pytest.param("s3", "everywhere", 12, marks=s3_server.NEEDED),
        ("file", "random", 40),
        ("file", "everywhere", 1),
        pytest.param("s3", "random", 15, marks=s3_server.NEEDED),
        pytest.param("s3", "everywhere", 4, marks=s3_server.NEEDED),
    ],
)
def test_the_newest_loads_whenever_a_job_is_killed(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, mode: str, count: int
) -> None:
    env, address = dict(os.environ), f"file://{tmp_path}/store"
    if kind == "s3":
        env |= request.getfixturevalue("s3")
        address = f"s3://{s3_server.BUCKET}/{tmp_path.name}-{mode}-{count}"
    seed = str(int.from_bytes(os.urandom(3), "little"))
    run = subprocess.run(
        [sys.executable, str(_PROGRAM), str(tmp_path / "local"), address, mode, str(count), seed],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 0, f"seed {seed}: {run.stdout}{run.stderr}"
    counts = json.loads(run.stdout)
    assert counts["deaths"] >= 8, "kills came in the middle"
    assert counts["newer afterwards"] > 0, "some checkpoints became complete"
    assert counts["deaths that left something pending"] > 0, "others were in the middle"
    if mode == "everywhere":
        assert counts["operations"] > 100 and counts["deaths"] >= counts["operations"] // count - 1
