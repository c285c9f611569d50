"""Several ranks as processes of this machine, each with variables of its own.

They are forked from a process that has imported everything, as those of tests/dist are. ``ranks.py
<module>:<function> <file>`` is one of them: it calls ``function(rank, *arguments)`` and leaves the
result in the file, pickled.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.processes import TimedOut, words_of
from tests.dist.pool import Pool
from tests.dist.processes import Started, wait_for_ranks


@dataclass(frozen=True)
class Ended:
    """The end of a rank.

    Attributes:
        status: exit status of the process; a negative one is the signal.
        hung: the process had to be killed.
        result: return value of the function; None if there is none.
    """

    status: int
    hung: bool
    result: Any


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


@functools.cache
def _pool() -> Pool:
    """Returns the pool whose process is forked; it ends with this one."""
    return Pool({"SMP_TIMEOUT_S": "120"})


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
    zygote = _pool().zygote()  # its imports are no part of the time
    deadline = time.monotonic() + timeout_s
    outputs = Path(tempfile.mkdtemp(prefix="smp-gpu-ranks-"))  # removed with the output
    with tempfile.TemporaryDirectory(prefix="smp-gpu-") as name:
        paths = [Path(name) / f"rank{rank}" for rank in range(world_size)]
        pids = []
        for rank, path in enumerate(paths):
            path.write_bytes(pickle.dumps((rank, tuple(arguments))))
            argv = [f"{function.__module__}:{function.__qualname__}", str(path)]
            env = _variables(rank, world_size, name) | env_of(rank)
            output = str(outputs / path.name)
            pids += zygote.start("script", __file__, argv, env, f"{output}.log")
        found = wait_for_ranks(_pool(), Started(pids, outputs, deadline))
        for rank in found:
            print(rank.output, end="", flush=True)
        return [
            Ended(rank.returncode, rank.hung, _result(Path(f"{path}.result")))
            for rank, path in zip(found, paths, strict=True)
        ]


def _variables(rank: int, world_size: int, folder: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "SMP_RENDEZVOUS": f"file://{folder}/rendezvous",
        # The host's name may have an address that no process can reach.
        "GLOO_SOCKET_IFNAME": "lo",
    }


def results_of(ended: Sequence[Ended]) -> list[Any]:
    """Returns the return values of all ranks.

    Raises:
        RuntimeError: names the ranks that failed; their output has gone before.
        TimedOut: none failed, and some did not end.
    """
    hung = [rank for rank, end in enumerate(ended) if end.hung]
    failed = {
        rank: words_of(end.status)
        for rank, end in enumerate(ended)
        if end.status != 0 and not end.hung
    }
    if failed:
        raise RuntimeError(f"ranks that failed: {failed}, that did not end: {hung}; see the log")
    if hung:
        raise TimedOut(f"ranks that did not end in time: {hung}")
    return [end.result for end in ended]


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
