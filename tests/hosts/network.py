"""Hosts made of network namespaces: N of them with M ranks each, and links of a given speed.

A host is a namespace with one interface, `eth0`; all are joined by a bridge in a namespace of their
own. So nothing outside is touched or reached, and `Network` needs no more than the right to make
namespaces (root, or the capability CAP_SYS_ADMIN) and the programs `ip` and `tc`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType

from tests.dist.pool import Pool
from tests.dist.processes import Ended, Started, wait_for_ranks
from tests.dist.zygote import NETWORK_VARIABLE

_PORT = 29511
_NUM_NETWORKS = [0]


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


@cache
def why_not() -> str | None:
    """Why this machine cannot have such hosts; None if it can."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"no program {program} (package iproute2)"
    try:
        with Network(2, mbit=100.0):
            return None
    except OSError as error:
        return f"network namespaces are not permitted here: {error}"


class Network:
    """Hosts that last as long as the block. Addresses are 10.231.0.1 and following."""

    def __init__(self, num_hosts: int, *, mbit: float, latency_ms: float = 0.0) -> None:
        """
        Args:
            num_hosts: namespaces to make.
            mbit: Mbit/s that a host can send.
            latency_ms: of each packet that a host sends; 0: what the machine needs.
        """
        _NUM_NETWORKS[0] += 1
        self._prefix = f"smp{os.getpid()}n{_NUM_NETWORKS[0]}"
        self._num_hosts, self._mbit, self._latency_ms = num_hosts, mbit, latency_ms
        self._namespaces: list[str] = []

    def __enter__(self) -> Network:
        try:
            self._make()
        except OSError:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _make(self) -> None:
        middle = f"{self._prefix}m"
        for name in (middle, *(self.host(index) for index in range(self._num_hosts))):
            _call("ip", "netns", "add", name)
            self._namespaces.append(name)
        _call("ip", "-n", middle, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", middle, "link", "set", "bridge", "up")
        for index in range(self._num_hosts):
            self._join(index, middle)

    def _join(self, index: int, middle: str) -> None:
        host, port = self.host(index), f"port{index}"
        pair = ("type", "veth", "peer", "name", "eth0", "netns", host)
        _call("ip", "-n", middle, "link", "add", port, *pair)
        _call("ip", "-n", middle, "link", "set", port, "master", "bridge", "up")
        _call("ip", "-n", host, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _call("ip", "-n", host, "link", "set", device, "up")
        # What a port may hold: 50 ms of its speed, as switches do, and at least some packets.
        limit = max(64_000, int(self._mbit * 1e6 / 8 * 0.05))
        burst = max(16_000, int(self._mbit * 1e6 / 8 / 250))
        shape = ("rate", f"{self._mbit:g}mbit", "burst", str(burst), "limit", str(limit))
        tc = ("tc", "-n", host, "qdisc", "add", "dev", "eth0")
        _call(*tc, "root", "handle", "1:", "tbf", *shape)
        if self._latency_ms:
            delay = ("netem", "delay", f"{self._latency_ms:g}ms", "limit", "100000")
            _call(*tc, "parent", "1:1", *delay)

    def _remove(self) -> None:
        while self._namespaces:
            subprocess.run(["ip", "netns", "del", self._namespaces.pop()], check=False)

    def host(self, index: int) -> str:
        """The name of a namespace."""
        return f"{self._prefix}h{index}"

    def address(self, index: int) -> str:
        """Where a host is reached by the others."""
        return f"10.231.0.{index + 1}"

    def cut(self, index: int) -> None:
        """Takes the cable of a host out."""
        _call("ip", "-n", self.host(index), "link", "set", "eth0", "down")

    def start(
        self,
        pool: Pool,
        script: Path,
        argv: Sequence[str],
        *,
        ranks_per_host: int = 1,
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
    ) -> Started:
        """Starts a script on all hosts, as a launcher would; the same as `start_ranks` else."""
        folder = Path(tempfile.mkdtemp(prefix="smp-hosts-"))
        world_size = self._num_hosts * ranks_per_host
        pids = []
        for rank in range(world_size):
            host, local_rank = divmod(rank, ranks_per_host)
            settings = {
                NETWORK_VARIABLE: f"/run/netns/{self.host(host)}",
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(ranks_per_host),
                "MASTER_ADDR": self.address(0),
                "MASTER_PORT": str(_PORT),
                "GLOO_SOCKET_IFNAME": "eth0",
                **(env or {}),
            }
            output = str(folder / f"rank{rank}.log")
            pids += pool.zygote().start("script", str(script), list(argv), settings, output)
        return Started(pids, folder, time.monotonic() + timeout)

    def run(
        self,
        pool: Pool,
        script: Path,
        argv: Sequence[str],
        *,
        ranks_per_host: int = 1,
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
    ) -> list[Ended]:
        """`start`, and the end of all; what lives longer than `timeout` seconds is killed."""
        started = self.start(
            pool, script, argv, ranks_per_host=ranks_per_host, timeout=timeout, env=env
        )
        return wait_for_ranks(pool, started)
