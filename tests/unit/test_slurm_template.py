"""The batch script that we ship: what it starts, and when it queues the job again."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from smp.world.launch import plan_rendezvous, read_launch
from tests.conftest import REPO
from tests.patience import PATIENCE_S

SCRIPT = REPO / "examples" / "slurm" / "train.sbatch"

# Variables that Slurm 23 sets in each task of a step of the template's size.
TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NNODES": "2",
}

_FAKE_SRUN = """#!{python}
import os, sys
for rank in range(2):
    env = os.environ | {{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}}
    status = os.spawnvpe(os.P_WAIT, sys.argv[2], sys.argv[2:], env)
sys.exit(status)
"""


@pytest.mark.parametrize(("status", "is_queued"), [(0, False), (75, True), (3, False)])
def test_job_is_queued_again_only_when_it_saved(
    tmp_path: Path, status: int, is_queued: bool
) -> None:
    def program(name: str, text: str) -> None:
        path = tmp_path / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    program("srun", _FAKE_SRUN.format(python=sys.executable))
    program("scontrol", f'#!/bin/bash\necho "$@" > {tmp_path}/queued\n')
    program("python", f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    (tmp_path / "train.py").write_text(
        "import os, sys\n"
        "print('rank', os.environ['SLURM_PROCID'], sys.argv[1:], os.environ['OMP_NUM_THREADS'],\n"
        "      os.path.isdir(os.environ['SMP_PREEMPTION_PATH']))\n"
        f"sys.exit({status})\n"
    )
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(SCRIPT), "train.py", "--lr", "1"],
        env={
            **os.environ,
            **TASK,
            "PATH": path,
            "SLURM_CPUS_PER_TASK": "6",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("rank")] == [
        f"rank {rank} ['--lr', '1'] 6 True" for rank in range(2)
    ]
    assert (tmp_path / "queued").exists() == is_queued
    if is_queued:
        assert (tmp_path / "queued").read_text().split() == ["requeue", "4711"]


def test_tasks_of_the_template_find_their_place_and_meet() -> None:
    plans = []
    for rank in (0, 9):
        env = TASK | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 8)}
        env |= {"SLURM_NODEID": str(rank // 8)}
        launch = read_launch(env, "here")
        assert (launch.global_rank, launch.world_size) == (rank, 16)
        assert (launch.local_rank, launch.local_size) == (rank % 8, 8)
        plans.append(plan_rendezvous(launch, env, "/scratch", 1000))
    assert plans[0] == plans[1]
    assert (plans[0].kind, plans[0].host) == ("tcp", "gpu07")


def test_template_is_a_batch_script_for_slurm() -> None:
    lines = SCRIPT.read_text().splitlines()
    options = [line for line in lines if line.startswith("#SBATCH")]
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(lines.index(option) < first_command for option in options), (
        "Slurm stops reading there"
    )
    assert "#SBATCH --signal=TERM@120" in options and "#SBATCH --requeue" in options
