"""The same script runs under torchrun, mpirun, Slurm's variables, and as one plain process."""

from __future__ import annotations

import json
import os
import re
import socket
from typing import Any

import pytest
import torch

from tests.dist.pool import Pool
from tests.dist.processes import REPO, launch, mpirun, run_ranks
from tests.dist.scripts.train_small import CASE
from tests.reference.single_process import train_reference

pytestmark = pytest.mark.waits

SCRIPT = REPO / "tests" / "dist" / "scripts" / "train_small.py"


@pytest.fixture(autouse=True)
def two_partitions_unless_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout comes from the launcher's side, as on SageMaker."""
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", json.dumps({"partitions": 2}))


def result_of(text: str, returncode: int) -> dict[str, Any]:
    match = re.search(r"RESULT (\{.*\})", text)
    assert returncode == 0 and match, f"status {returncode}:\n{text}"
    result: dict[str, Any] = json.loads(match.group(1))
    return result


def check(result: dict[str, Any], size: int) -> None:
    assert result["size"] == size
    reference = train_reference(CASE, torch.float64, 1, 4)
    expected = [loss for step in reference.losses for loss in step[0]]
    assert torch.allclose(
        torch.tensor(result["losses"]), torch.tensor(expected), rtol=1e-10, atol=0
    )
    assert (result["calls"] > 0) == (size > 1), "remote execution happens on several ranks only"


def test_plain_process_gives_the_reference_losses(pool: Pool) -> None:
    [done] = run_ranks(pool, SCRIPT, 1, env={"SM_HP_MP_PARAMETERS": "{}"}, launcher=None)
    check(result_of(done.output, done.returncode), 1)


# test_robustness.py compares the numbers of a job under torchrun.
@pytest.mark.sample(keep=0)
def test_mpirun_gives_the_reference_losses() -> None:
    command = mpirun(2)
    if command is None:
        pytest.skip("no mpirun on this machine")
    done = launch([*command, str(SCRIPT)])
    check(result_of(done.stdout, done.returncode), 2)


def test_slurm_variables_give_the_reference_losses(pool: Pool) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    wrapper = REPO / "tests" / "dist" / "scripts" / "as_slurm.py"
    env = {
        "SM_HP_MP_PARAMETERS": os.environ["SM_HP_MP_PARAMETERS"],
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    done = run_ranks(pool, wrapper, 2, [str(SCRIPT)], env=env)
    assert all(d.returncode == 0 for d in done), done[0].output + done[1].output
    check(result_of(done[0].output, done[0].returncode), 2)
