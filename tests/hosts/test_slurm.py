"""Jobs that a real Slurm starts, preempts and queues again; its nodes are namespaces."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.dist import training
from tests.dist.pool import Pool
from tests.dist.processes import REPO
from tests.dist.test_robustness import SCRIPT, Trained, step_saved, undisturbed
from tests.hosts import network, slurm
from tests.hosts.network import Network
from tests.hosts.ranks import TASK, Task
from tests.hosts.slurm import Slurm
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(network.why_not() is not None, reason=str(network.why_not())),
    pytest.mark.skipif(slurm.why_not() is not None, reason=str(slurm.why_not())),
]

TEMPLATE = REPO / "examples" / "slurm" / "train.sbatch"
# Options that replace the template's for nodes without a GPU.
NODES = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1"]
# The script saves more than the library does by the template's path: the state of its schedule.
BY_ITSELF = f"""
import os, runpy
os.environ.pop("SMP_PREEMPTION_PATH")
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
STEPS = 12
CONFIG = {"pipeline_parallel_degree": 2}


@pytest.fixture
def cluster() -> Iterator[Slurm]:
    # Slurm's sockets lie in the folder, and the path of a socket has at most 107 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder,
        Network(2) as hosts,
        Slurm(hosts, Path(folder) / "slurm") as one,
    ):
        yield one


class Srun:
    """A `Pool` whose ranks are tasks of a step."""

    def __init__(self, cluster: Slurm, *options: str) -> None:
        self._cluster, self._options = cluster, options

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = PATIENCE_S,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Results of ``function(rank, *args)`` on all ranks."""
        with Task(function, args) as task:
            words = ["srun", *self._options, f"-n{world_size}", sys.executable, str(TASK)]
            done = self._cluster.call(*words, str(task.folder), timeout_s=timeout, **(env or {}))
            assert done.returncode == 0, f"{done.stdout}{done.stderr}{self._cluster.logs()}"
            return task.results(world_size)


def test_srun_trains_like_one_process(cluster: Slurm) -> None:
    training.check_runs(Srun(cluster, "-N2"), [training.Run("reuse", 2, 2)])


def output_of(folder: Path) -> str:
    return "".join(log.read_text() for log in folder.glob("smp-*.log"))


def test_a_preempted_job_is_queued_again_and_ends_as_if_it_were_not(
    pool: Pool, cluster: Slurm, tmp_path: Path
) -> None:
    folder, hold = tmp_path / "job", tmp_path / "hold"
    words = ["--steps", str(STEPS), "--config", json.dumps(CONFIG)]
    script = tmp_path / "train.py"
    script.write_text(BY_ITSELF)
    job = cluster.submit(
        *NODES, str(TEMPLATE), str(script), str(folder), *words, "--hold", str(hold),
        cwd=tmp_path,
    )  # fmt: skip
    cluster.wait(job, ["RUNNING"])
    cluster.until(lambda: "STEP 4 " in output_of(tmp_path), "the job does not train")
    urgent = cluster.submit(
        "-purgent", "-N2", "--exclusive", "--wrap", "srun -N2 sleep 3", cwd=tmp_path
    )
    told = "SIGTERM: all ranks will stop"
    cluster.until(lambda: told in output_of(tmp_path), "nobody is told of the preemption")
    time.sleep(0.5)  # ranks agree where to stop before those that hold may end
    hold.touch()
    cluster.wait(urgent, ["COMPLETED"])
    state = cluster.wait(job, ["COMPLETED", "FAILED", "CANCELLED"])
    said = output_of(tmp_path)
    assert state == "COMPLETED", said
    assert said.count("smp: saved; queueing job") <= 1
    first, second = re.split(r"(?=BEGIN [1-9])", said, maxsplit=1)
    assert "BEGIN 0" in first and "RESULT" not in first
    trained = Trained()
    trained.add(first)
    assert 0 < max(trained.losses) < STEPS and re.search(rf"BEGIN {max(trained.losses)}\n", second)
    trained.add(second)
    trained.check(undisturbed(pool, tmp_path, 2, *words), 1, STEPS)
    assert step_saved(folder) < STEPS
