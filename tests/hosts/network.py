"""Hosts made of namespaces, and links between them that are slow, lossy, or broken.

A host is a process that sleeps in namespaces of its own: of the network, with one interface `eth0`;
of the host name; of mounts, with an `/etc/hosts` that names all hosts and an own `/dev/shm`. All
are joined by a bridge in a namespace of its own, so nothing outside is touched or reached, and
nothing is left once these processes have ended, which the kernel sees to when the test is killed.
Needed are the right to make namespaces (root, or the capability CAP_SYS_ADMIN) and the programs
`ip` and `tc`. Processor, files and the wall clock are those of the machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType

from tests.dist.zygote import die_with_parent
from tests.hosts.wire import Quality, Wire

_NEEDED = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_NOBODY = "02:00:00:00:00:fe"  # an address that no interface has
# $1: name of the host, $2: its /etc/hosts. It says when it is done, and sleeps.
_SETTLE = """
set -e
echo "$1" > /proc/sys/kernel/hostname
mount --bind "$2" /etc/hosts
mount -t tmpfs -o size=512m tmpfs /dev/shm
echo settled
exec sleep infinity
"""


@cache
def why_not(latency_ms: float = 0.0) -> str | None:
    """Returns why this machine cannot have such hosts or links, or None if it can."""
    for program, package in _NEEDED.items():
        if shutil.which(program) is None:
            return f"no program {program} (package {package})"
    try:
        with Network(2, latency_ms=latency_ms):
            return None
    except OSError as error:
        return f"network namespaces are not permitted here: {error}"


@dataclass(frozen=True)
class Traffic:
    """Bytes of an interface, with all headers."""

    received: int
    sent: int

    def since(self, before: Traffic) -> Traffic:
        return Traffic(self.received - before.received, self.sent - before.sent)


def read_traffic(device: str, path: str = "/proc/self/net/dev") -> Traffic:
    """Returns the bytes that went through an interface of the calling process's host."""
    for line in Path(path).read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == device:
            words = counts.split()
            return Traffic(int(words[0]), int(words[8]))
    raise ValueError(f"{path} has no interface {device}")


class Network:
    """Hosts that last as long as the block: `host0` is 10.231.0.1 and so on."""

    def __init__(
        self,
        num_hosts: int,
        *,
        mbit: float | None = None,
        latency_ms: float = 0.0,
        loss_percent: float = 0.0,
        is_degradable: bool = False,
        has_names: bool = True,
    ) -> None:
        """
        Args:
            num_hosts: number of hosts to make.
            mbit: speed in Mbit/s at which a host can send; None: the machine's own speed.
            latency_ms: delay of each packet that a host sends; 0: the machine's own delay.
            loss_percent: share of the packets sent by a host that are lost, in percent.
            is_degradable: whether `degrade` may be called later.
            has_names: whether hosts find addresses by name, their own and each other's.
        """
        self.num_hosts = num_hosts
        self._mbit, self._has_names = mbit, has_names
        self._latency_ms, self._loss_percent = latency_ms, loss_percent
        self._wire = Wire() if is_degradable or latency_ms or loss_percent else None
        self._qualities: list[Quality] = []
        self._keepers: list[subprocess.Popen[str]] = []
        self._folder: Path | None = None

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

    # ---- making ------------------------------------------------------------

    def _make(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="smp-network-"))
        lines = ["127.0.0.1 localhost"]
        if self._has_names:
            lines += [f"{self.address(i)} {self.name(i)}" for i in range(self.num_hosts)]
        hosts_file = self._folder / "hosts"
        hosts_file.write_text("\n".join(lines) + "\n")
        for index in range(self.num_hosts):
            own = ("--uts", "--mount")
            self._keep(*own, "sh", "-c", _SETTLE, "sh", self.name(index), str(hosts_file))
        self._keep("sh", "-c", "echo settled; exec sleep infinity")
        self._in_middle("ip", "link", "add", "bridge", "type", "bridge")
        self._in_middle("ip", "link", "set", "bridge", "up")
        for index in range(self.num_hosts):
            self._join(index)
        if self._wire is not None:
            self._wire.start()

    def _keep(self, *words: str) -> None:
        keeper = subprocess.Popen(
            ["unshare", "--net", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=die_with_parent,
        )
        self._keepers.append(keeper)
        assert keeper.stdout is not None
        line = keeper.stdout.readline()
        if line != "settled\n":
            raise OSError(line.strip() or "unshare ended without a word")

    def _join(self, index: int) -> None:
        if self._wire is not None:
            middle = self._keepers[-1].pid
            self._qualities.append(self._wire.add(self.pid(index), middle, f"port{index}"))
            self.degrade(index, latency_ms=self._latency_ms, loss_percent=self._loss_percent)
        else:
            pair = ("type", "veth", "peer", "name", "eth0", "netns", str(self.pid(index)))
            self._in_middle("ip", "link", "add", f"port{index}", *pair)
        self._in_middle("ip", "link", "set", f"port{index}", "master", "bridge", "up")
        self.call(index, "ip", "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            self.call(index, "ip", "link", "set", device, "up")
        if self._mbit is not None:
            # A port may hold 50 ms of its speed, as switches do, and at least some packets.
            bytes_per_s = self._mbit * 1e6 / 8
            limit, burst = max(64_000, int(bytes_per_s / 20)), max(16_000, int(bytes_per_s / 250))
            shape = ("rate", f"{self._mbit:g}mbit", "burst", str(burst), "limit", str(limit))
            tc = ("tc", "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "tbf")
            self.call(index, *tc, *shape)

    def _remove(self) -> None:
        if self._wire is not None:
            self._wire.close()
        for keeper in self._keepers:
            keeper.kill()
            keeper.communicate()
        self._keepers = []
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def _in_middle(self, *words: str) -> None:
        _call("nsenter", "-t", str(self._keepers[-1].pid), "--net", *words)

    # ---- hosts -------------------------------------------------------------

    def name(self, index: int) -> str:
        """The name that a host has for itself and others."""
        return f"host{index}"

    def address(self, index: int) -> str:
        """Returns the address at which the other hosts reach a host."""
        return f"10.231.0.{index + 1}"

    def pid(self, index: int) -> int:
        """A process in the namespaces of a host."""
        return self._keepers[index].pid

    def command(self, index: int, words: Sequence[str]) -> list[str]:
        """Returns the words that run a command on a host."""
        return ["nsenter", "-t", str(self.pid(index)), "--net", "--uts", "--mount", *words]

    def call(self, index: int, *words: str) -> None:
        """Runs a short command on a host.

        Raises:
            OSError: with what it says, if it fails.
        """
        _call(*self.command(index, words))

    def traffic(self, index: int, device: str = "eth0") -> Traffic:
        """Returns the bytes that have gone through an interface of a host so far."""
        return read_traffic(device, f"/proc/{self.pid(index)}/net/dev")

    # ---- links -------------------------------------------------------------

    def degrade(self, index: int, *, latency_ms: float = 0.0, loss_percent: float = 0.0) -> None:
        """Delays all later packets of a host, and loses a share of them."""
        quality = self._qualities[index]
        quality.latency_s, quality.loss = latency_ms / 1e3, loss_percent / 1e2

    @property
    def num_lost(self) -> int:
        """Packets that `degrade` has lost."""
        return 0 if self._wire is None else self._wire.num_lost

    def cut(self, index: int) -> None:
        """Takes the cable of a host out: its interface has no carrier any more."""
        self._in_middle("ip", "link", "set", f"port{index}", "down")

    def mend(self, index: int) -> None:
        """Puts it back in."""
        self._in_middle("ip", "link", "set", f"port{index}", "up")

    def silence(self, index: int) -> None:
        """Loses all packets to and from a host, as a firewall or a switch that died does.

        Interfaces, addresses and connections look as before.
        """
        for other in range(self.num_hosts):
            if other != index:
                self.part(index, other)

    def part(self, one: int, other: int) -> None:
        """Two hosts do not reach each other any more, and all others do."""
        for here, there in ((one, other), (other, one)):
            wrong = ("lladdr", _NOBODY, "nud", "permanent", "dev", "eth0")
            self.call(here, "ip", "neigh", "replace", self.address(there), *wrong)

    def remove(self, index: int) -> None:
        """A host is gone with its interface; its processes do not hear of it by a signal."""
        self._in_middle("ip", "link", "del", f"port{index}")

    def kill(self, index: int) -> None:
        """Kills all that runs on a host, and removes it."""
        own = os.readlink(f"/proc/{self.pid(index)}/ns/net")
        self.remove(index)
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                is_there = os.readlink(folder / "ns/net") == own
            except OSError:  # it has ended
                continue
            if is_there and int(folder.name) != self.pid(index):
                with suppress(ProcessLookupError):
                    os.kill(int(folder.name), signal.SIGKILL)


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip()
        raise OSError(f"{' '.join(words)}: {said or f'status {done.returncode}'}")
