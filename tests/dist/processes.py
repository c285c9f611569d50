"""Ranks as fresh processes that may be killed, and as children of real launchers."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from smp.world import failure
from tests.dist.pool import Pool
from tests.installed import python_path
from tests.patience import PATIENCE_S

REPO = Path(__file__).resolve().parents[2]
_RUN_IDS = itertools.count()


@dataclass(frozen=True)
class Ended:
    """Holds a process's exit status, time of its end, and output."""

    rank: int
    returncode: int  # negative: the signal
    time: float  # monotonic; infinite when it had to be killed by the test
    output: str

    @property
    def hung(self) -> bool:
        return self.time == float("inf")


@dataclass(frozen=True)
class Started:
    """Ranks of one job that are running."""

    pids: list[int]
    folder: Path
    deadline: float


def start_ranks(
    pool: Pool,
    script: Path,
    world_size: int,
    argv: Sequence[str] = (),
    timeout: float = PATIENCE_S,
    env: dict[str, str] | None = None,
    launcher: str | None = "torchrun",
    spares: int = 0,
) -> Started:
    """Starts a script in `world_size` processes of its own, as `launcher` would.

    With "smp run" ranks have names of their own, in which Accelerate does not see a job of its own,
    and there may be processes that wait for the places of ranks; with None there is no word of
    ranks.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"smp-run{next(_RUN_IDS)}-"))
    pids = []
    for rank in range(world_size + spares):
        settings: dict[str, str] = {}
        if launcher == "smp run":
            settings = {"SMP_RANK": str(rank), "SMP_WORLD_SIZE": str(world_size)}
            settings |= {"SMP_SPARES": str(spares), "SMP_REPLACEMENT_S": "0"} if spares else {}
        elif launcher is not None:
            settings = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            settings |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        if launcher is not None:
            settings["SMP_RENDEZVOUS"] = f"file://{folder}/rendezvous"
        settings |= env or {}
        output = str(folder / f"rank{rank}.log")
        pids += pool.zygote().start("script", str(script), list(argv), settings, output)
    return Started(pids, folder, time.monotonic() + timeout)


def wait_for_ranks(pool: Pool, started: Started) -> list[Ended]:
    """Waits for the end; processes that live past their deadline are killed and count as hung."""
    zygote, deadline = pool.zygote(), started.deadline
    hung = set()
    while any(zygote.ended(pid) is None for pid in started.pids):
        if time.monotonic() > deadline:
            hung = {pid for pid in started.pids if zygote.ended(pid) is None}
            for pid in hung:
                zygote.kill(pid)
            deadline = float("inf")
        time.sleep(0.02)
    results, stacks = [], stacks_of(started, removes=True)
    for rank, pid in enumerate(started.pids):
        ended = zygote.ended(pid)
        assert ended is not None
        output = (started.folder / f"rank{rank}.log").read_text() + stacks.get(rank, "")
        when = float("inf") if pid in hung else ended[1]
        results.append(Ended(rank, ended[0], when, output))
    shutil.rmtree(started.folder)
    return results


def stacks_of(started: Started, *, removes: bool = False) -> dict[int, str]:
    """Returns what each rank has written to the file of stacks."""
    own = failure.file_of(f"file:{started.folder}/rendezvous#0 size {len(started.pids)}")
    found: dict[int, str] = {}
    for file in own.parent.glob("errors-*.txt"):
        try:
            text = file.read_text()
        except FileNotFoundError:
            continue  # of another job, which has ended since the folder was listed
        processes = {int(pid) for pid in re.findall(r"^====.* process (\d+)$", text, re.MULTILINE)}
        if file != own and not processes & set(started.pids):
            continue  # of another job
        if removes:
            file.unlink()
        for section in re.split(r"^(?=====)", text, flags=re.MULTILINE):
            # While smp.init fails a process has no rank yet.
            match = re.match(r"==== .*process (\d+)$", section, re.MULTILINE)
            if match and int(match[1]) in started.pids:
                rank = started.pids.index(int(match[1]))
                found[rank] = found.get(rank, "\n") + section
            elif match := re.match(r"==== \[global_rank (\d+)", section):
                found[int(match[1])] = found.get(int(match[1]), "\n") + section
    return found


def run_ranks(
    pool: Pool,
    script: Path,
    world_size: int,
    argv: Sequence[str] = (),
    timeout: float = PATIENCE_S,
    env: dict[str, str] | None = None,
    launcher: str | None = "torchrun",
    spares: int = 0,
) -> list[Ended]:
    """`start_ranks` and `wait_for_ranks`."""
    started = start_ranks(pool, script, world_size, argv, timeout, env, launcher, spares)
    return wait_for_ranks(pool, started)


def run_to_the_end(
    pool: Pool, script: Path, world_size: int, argv: Sequence[str], timeout: float = PATIENCE_S
) -> None:
    """Runs ranks as `run_ranks` does, and checks that all of them end well.

    Raises:
        AssertionError: a rank failed; the text has the output of the rank that failed first.
    """
    ended = run_ranks(pool, script, world_size, argv, timeout)
    failed = sorted((rank for rank in ended if rank.returncode != 0), key=lambda rank: rank.time)
    assert not failed, (
        f"rank {failed[0].rank} of {world_size} ended with {failed[0].returncode}:\n"
        f"{failed[0].output}"
    )


def meter_settings(folder: Path) -> dict[str, str]:
    """Variables with which a process and its children have their allocations counted.

    Args:
        folder: folder in which the allocation meter is built.
    """
    from benchmarks.allocation_meter import preloaded

    settings: dict[str, str] = preloaded({"PATH": os.environ["PATH"]}, folder)
    return settings


def torchrun(num_processes: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone"] + [
        f"--nproc-per-node={num_processes}"
    ]


def mpirun(num_processes: int) -> list[str] | None:
    """The command, or None where there is no mpirun."""
    beside = Path(sys.executable).parent / "mpirun"
    program = shutil.which("mpirun") or (str(beside) if beside.exists() else None)
    if program is None:
        return None
    return [program, "-np", str(num_processes), "--oversubscribe", "--bind-to", "none"] + (
        ["--allow-run-as-root"] if os.geteuid() == 0 else []
    ) + [sys.executable]  # fmt: skip


def launch(command: Sequence[str], timeout: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    """Runs a launcher; stdout and stderr come back as one text."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SMP_RENDEZVOUS")
    }
    env["PYTHONPATH"] = python_path(REPO, env.get("PYTHONPATH", ""))
    env["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        list(command),
        env=env,
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
