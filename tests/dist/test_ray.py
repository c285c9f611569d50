"""Ray Train starts workers, which train a pipeline and go on when one is killed.

With the package alone (`pip install -r requirements/ray.txt`); skipped without it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.dist.processes import REPO
from tests.dist.zygote import RANK_VARIABLES, die_with_parent
from tests.installed import python_path
from tests.patience import PATIENCE_S, wait_until

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="ray is not installed; pip install -r requirements/ray.txt",
    ),
]

SCRIPT = REPO / "examples" / "ray" / "train.py"
# Runs a script on a cluster of its own, with as little of it as can be.
ON_RAY = """
import runpy, sys
import ray

ray.init(num_cpus=3, include_dashboard=False, object_store_memory=80 << 20)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Driver:
    """A script that starts Ray on this machine alone, in a session of its own."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        env = {name: text for name, text in os.environ.items() if name not in RANK_VARIABLES}
        env |= {
            "PYTHONPATH": python_path(REPO, env.get("PYTHONPATH", "")),
            "OMP_NUM_THREADS": "1",
            "SMP_DEVICE": "cpu",
            "RAY_AUTH_MODE": "disabled",
            "RAY_DEDUP_LOGS": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray's default is 15: workers then wait for every other process.
            "RAY_worker_niceness": "0",
        }
        self._log = log
        with open(log, "wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-c", ON_RAY, *words],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, look: Callable[[], bool]) -> None:
        wait_until(look, lambda: self.said, lambda: self._process.poll() is None)

    def wait(self) -> str:
        """Waits for a good end, and returns the output."""
        try:
            status = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it goes on after {PATIENCE_S} s:\n{self.said}") from None
        assert status == 0, self.said
        return self.said

    def end(self) -> None:
        """Ray ends what it has started when it is told to, and not when it is killed."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def start(*words: str) -> Driver:
        drivers.append(Driver(words, tmp_path / f"log{len(drivers)}"))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.end()


def starts_of(said: str) -> list[tuple[int, int]]:
    """First step and process of worker 1, start by start. Ray shows what is printed twice."""
    found = re.findall(r"worker 1 of 2: step (\d+), process (\d+)", said)
    return [(int(step), int(pid)) for step, pid in dict.fromkeys(found)]


def losses_of(said: str) -> dict[int, str]:
    """Returns each step's loss; checks that a repeated step has the same one."""
    losses: dict[int, str] = {}
    for step, loss in re.findall(r"step (\d+): loss (\S+)", said):
        assert losses.setdefault(int(step), loss) == loss, f"step {step} has two losses:\n{said}"
    return losses


def losses_of_one_process(num_steps: int) -> list[float]:
    """The example's model and data, in plain PyTorch."""
    spec = importlib.util.spec_from_file_location("ray_example", SCRIPT)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(1)
    model = example.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(num_steps):
        x = example.batch_of(step)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_worker_that_is_killed_is_started_again_and_goes_on(
    drive: Callable[..., Driver], tmp_path: Path
) -> None:
    words = ["--folder", str(tmp_path / "run"), "--steps", "9", "--save-every", "3"]
    driver = drive(str(SCRIPT), *words)
    # Ray has taken a report when the next one has been accepted.
    driver.wait_for(lambda: "step 5: " in driver.said)
    [(_, pid)] = starts_of(driver.said)
    os.kill(pid, signal.SIGKILL)
    said = driver.wait()
    assert [step for step, _ in starts_of(said)] in ([0, 3], [0, 6]), said
    losses = losses_of(said)
    assert list(losses) == list(range(1, 10))
    numbers = [float(loss) for loss in losses.values()]
    assert numbers == pytest.approx(losses_of_one_process(9), abs=2e-6)
    assert len(set(numbers)) == 9, "it learns"
    kept = sorted(path.name for path in (tmp_path / "run" / "smp").glob("step*"))
    assert kept == ["step6", "step9"], "Ray keeps two"
