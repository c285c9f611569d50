"""Several ranks as processes of this machine, each with variables of its own.

``python -m benchmarks.gpu.ranks <module>:<function> <file>`` is one of them: it calls
``function(rank, *arguments)`` and leaves the result in the file, pickled.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.figures import REPO

_OTHERS = ("MASTER_ADDR", "MASTER_PORT", "SMP_RENDEZVOUS", "SMP_FAULT")


@dataclass(frozen=True)
class Ended:
    """The end of a rank.

    Attributes:
        status: exit status of the process; a negative one is the signal.
        time_s: end on the monotonic clock; infinite if the process had to be killed.
        result: return value of the function; None if there is none.
    """

    status: int
    time_s: float
    result: Any

    @property
    def hung(self) -> bool:
        return self.time_s == float("inf")


def host_of_its_own(rank: int) -> dict[str, str]:
    """Returns variables by which NCCL takes a rank for one on another host: it may share a GPU."""
    return {
        "SMP_HOSTNAME": f"host{rank}",
        "NCCL_HOSTID": f"host{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    arguments: Sequence[Any],
    timeout_s: float,
    env_of: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> list[Ended]:
    """Calls ``function(rank, *arguments)`` in so many processes and waits for all of them.

    Args:
        function: function at a module's top level.
        env_of: further variables of a rank.
    """
    with tempfile.TemporaryDirectory(prefix="smp-gpu-") as name:
        folder = Path(name)
        for rank in range(world_size):
            (folder / f"rank{rank}").write_bytes(pickle.dumps((rank, tuple(arguments))))
        started = [
            _start(function, folder, rank, world_size, env_of(rank)) for rank in range(world_size)
        ]
        times = _wait(started, time.monotonic() + timeout_s)
        return [
            Ended(process.returncode, times[rank], _result(folder / f"rank{rank}.result"))
            for rank, process in enumerate(started)
        ]


def results_of(ended: Sequence[Ended]) -> list[Any]:
    """Returns the return values of all ranks.

    Raises:
        RuntimeError: names the ranks that hung or failed; their output has gone before.
    """
    hung = [rank for rank, end in enumerate(ended) if end.hung]
    failed = {rank: end.status for rank, end in enumerate(ended) if end.status != 0}
    if hung or failed:
        raise RuntimeError(
            f"ranks that did not end in time: {hung}; status of ranks that failed: {failed}; "
            "see the log"
        )
    return [end.result for end in ended]


def _start(
    function: Callable[..., Any], folder: Path, rank: int, world_size: int, more: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if name not in _OTHERS}
    paths = [str(REPO / "python"), str(REPO), env.get("PYTHONPATH", "")]
    env |= {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "SMP_RENDEZVOUS": f"file://{folder}/rendezvous",
        "SMP_TIMEOUT_S": "120",
        "OMP_NUM_THREADS": "1",
        **more,
    }
    name = f"{function.__module__}:{function.__qualname__}"
    command = [sys.executable, "-m", "benchmarks.gpu.ranks", name, str(folder / f"rank{rank}")]
    return subprocess.Popen(command, env=env, cwd=REPO, stdin=subprocess.DEVNULL)


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> list[float]:
    times: dict[int, float] = {}
    while len(times) < len(processes):
        for rank, process in enumerate(processes):
            if rank not in times and process.poll() is not None:
                times[rank] = time.monotonic()
        if time.monotonic() > deadline:
            for rank, process in enumerate(processes):
                if rank not in times:
                    process.kill()
                    process.wait()
                    times[rank] = float("inf")
        time.sleep(0.02)
    return [times[rank] for rank in range(len(processes))]


def _result(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def main() -> None:
    name, path = sys.argv[1:]
    module, _, qualname = name.partition(":")
    function = getattr(importlib.import_module(module), qualname)
    rank, arguments = pickle.loads(Path(path).read_bytes())
    result = function(rank, *arguments)
    Path(f"{path}.result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
