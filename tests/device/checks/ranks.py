"""Runs a function in two processes with the process group "late"; `python -m` of it is a rank."""

from __future__ import annotations

import importlib
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

from tests.conftest import REPO

NUM_RANKS = 2


def run_ranks(function: str, folder: Path) -> None:
    """Runs a function of `tests.device.checks.programs` in each rank.

    Args:
        function: name of a function with the rank as its argument.
        folder: empty folder for the ranks' meeting.

    Raises:
        AssertionError: a rank has failed; with the output of all.
    """
    arguments = [sys.executable, "-m", "tests.device.checks.ranks", function, str(folder / "store")]
    ranks = [
        subprocess.Popen(
            [*arguments, str(rank)],
            cwd=REPO,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * NUM_RANKS, "\n".join(outputs)


def main(function: str, store: str, rank: str) -> None:
    import torch.distributed as dist

    import tests.device  # noqa: F401 - registers the backend

    dist.init_process_group(
        "cpu:gloo,late:late",
        store=dist.FileStore(store, NUM_RANKS),
        rank=int(rank),
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=60),
    )
    programs = importlib.import_module("tests.device.checks.programs")
    getattr(programs, function)(int(rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
