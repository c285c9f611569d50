"""The ranks of a job on the hosts of a network, started by the tests or by real launchers."""

from __future__ import annotations

import itertools
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.dist.pool import Pool
from tests.dist.processes import REPO, Ended, Started, wait_for_ranks
from tests.dist.zygote import HOST_VARIABLE, RANK_VARIABLES, die_with_parent
from tests.hosts.network import Network
from tests.installed import python_path
from tests.patience import PATIENCE_S

TASK = REPO / "tests" / "hosts" / "task.py"
# Networks have equal addresses, and jobs of one machine share the folder of their files of stacks,
# whose names depend on address and port: each job has a port of its own.
_FIRST_PORT = 20000 + os.getpid() % 100 * 100
_PORTS = itertools.cycle(range(_FIRST_PORT, _FIRST_PORT + 100))
TRANSPORTS = ("gloo", "tcp")
"""Between hosts. A sample of cases shows both of each claim, in no more cases than before."""


class HostRanks:
    """Starts equally many ranks on each host of a network; `run` acts as that of a `Pool`."""

    def __init__(
        self,
        network: Network,
        pool: Pool,
        ranks_per_host: int = 1,
        transport: str | None = None,
    ) -> None:
        """
        Args:
            network: the network of the hosts.
            pool: the pool whose zygote starts the ranks.
            ranks_per_host: number of ranks on each host.
            transport: `SMP_TRANSPORT` of all ranks; None: the transport of the tests.
        """
        self.network, self._pool, self._per_host = network, pool, ranks_per_host
        self._env = {} if transport is None else {"SMP_TRANSPORT": transport}

    @property
    def world_size(self) -> int:
        return self.network.num_hosts * self._per_host

    def host_of(self, rank: int) -> int:
        """Index of the host of a rank."""
        return rank // self._per_host

    def start_script(
        self,
        script: Path,
        argv: Sequence[str],
        *,
        timeout: float = PATIENCE_S,
        env: Mapping[str, str] | None = None,
        env_of: Callable[[int], Mapping[str, str]] = lambda rank: {},
    ) -> Started:
        """Starts a script on all hosts, as a launcher would; otherwise acts as `start_ranks`.

        Args:
            script: path of the script.
            argv: arguments of the script.
            timeout: limit for the ranks in seconds.
            env: additional environment variables of all ranks.
            env_of: function that returns additional environment variables of one rank.
        """
        folder, port = Path(tempfile.mkdtemp(prefix="smp-hosts-")), next(_PORTS)
        pids = []
        for rank in range(self.world_size):
            host, local_rank = divmod(rank, self._per_host)
            settings = {
                HOST_VARIABLE: str(self.network.pid(host)),
                "RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(self._per_host),
                "MASTER_ADDR": self.network.address(0),
                "MASTER_PORT": str(port),
                **self._env,
                **(env or {}),
                **env_of(rank),
            }
            output = str(folder / f"rank{rank}.log")
            zygote = self._pool.zygote()
            pids += zygote.start("script", str(script), list(argv), settings, output)
        return Started(pids, folder, time.monotonic() + timeout)

    def run_script(self, script: Path, argv: Sequence[str], **how: Any) -> list[Ended]:
        """`start_script`, and the end of all; what lives longer than `timeout` s is killed."""
        return wait_for_ranks(self._pool, self.start_script(script, argv, **how))

    def wait(self, started: Started) -> list[Ended]:
        """The end of all ranks."""
        return wait_for_ranks(self._pool, started)

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, **how: Any
    ) -> list[Any]:
        """Results of ``function(rank, *args)`` on all ranks; `how` as of `start_script`."""
        assert world_size == self.world_size, "a layout of another number of ranks"
        with Task(function, args) as task:
            ended = self.run_script(TASK, [str(task.folder)], **how)
            for one in ended:
                assert one.returncode == 0, f"rank {one.rank} ended with {one.returncode}:\n" + (
                    "\n".join(f"rank {other.rank}:\n{other.output}" for other in ended)
                )
            return task.results(world_size)


class Launched:
    """A `Pool` whose ranks are those of a launcher."""

    def __init__(self, network: Network, commands: Sequence[Sequence[str]]) -> None:
        """
        Args:
            network: the network to run on.
            commands: commands for its first hosts, one each, in front of script and arguments.
        """
        self._network, self._commands = network, commands

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
            started = [
                start_command(
                    self._network,
                    index,
                    [*words, str(TASK), str(task.folder)],
                    task.folder / f"host{index}.log",
                    env or {},
                )
                for index, words in enumerate(self._commands)
            ]
            deadline = time.monotonic() + timeout
            try:
                codes = [one.wait(max(0.0, deadline - time.monotonic())) for one in started]
            except subprocess.TimeoutExpired:
                codes = [-signal.SIGALRM]
            finally:
                for one in started:
                    end_session(one)
            logs = "\n".join(
                f"host{index}:\n{(task.folder / f'host{index}.log').read_text()}"
                for index in range(len(self._commands))
            )
            assert not any(codes), f"{codes}\n{logs}"
            return task.results(world_size)


def write_agent(network: Network, folder: Path) -> Path:
    """A program that is called as ssh is, with a host and a command for its shell."""
    cases = "\n".join(
        f'{network.name(i)}) exec {shlex.join(network.command(i, ["sh", "-c"]))} "$reach; $*" ;;'
        for i in range(network.num_hosts)
    )
    agent = folder / "agent"
    # A host that is gone has no interface.
    reach = "reach='ip link show eth0 > /dev/null || exit 255'"
    agent.write_text(
        f'#!/bin/sh\n{reach}\nhost=$1\nshift\ncase "$host" in\n{cases}\nesac\nexit 1\n'
    )
    agent.chmod(0o755)
    return agent


class Task:
    """A function for `task.py`, and what its ranks have returned."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="smp-task-"))
        task = {"module": function.__module__, "function": function.__name__, "args": args}
        (self.folder / "task.pkl").write_bytes(pickle.dumps(task))

    def results(self, world_size: int) -> list[Any]:
        files = [self.folder / f"result{rank}.pkl" for rank in range(world_size)]
        return [pickle.loads(file.read_bytes()) for file in files]

    def __enter__(self) -> Task:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder)


def start_command(
    network: Network, index: int, words: Sequence[str], log: Path, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts a command on a host, in a session of its own."""
    settings = {name: text for name, text in os.environ.items() if name not in RANK_VARIABLES}
    path = python_path(REPO, settings.get("PYTHONPATH", ""))
    settings |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env}
    settings["PATH"] = f"{Path(sys.executable).parent}:{settings['PATH']}"
    with open(log, "wb") as file:
        return subprocess.Popen(
            network.command(index, words),
            env=settings,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Ends a command and what it has started, as far as that is in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
