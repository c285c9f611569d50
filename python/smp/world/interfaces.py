"""Chooses the address by which other hosts reach this one, and checks that they do."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from smp.world.presence import wait_for_hellos

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
# A host that answers later is useless for training.
_ANSWER_S = 10.0


@dataclass(frozen=True)
class HostAddress:
    """The address by which other hosts reach this one."""

    address: str
    """IPv4 or IPv6 address as text; empty: not known."""
    interface: str
    """Name of the interface with this address; empty: not known."""
    reason: str
    """Words that explain the choice."""

    def __str__(self) -> str:
        place = f" ({self.interface})" if self.interface else ""
        return f"{self.address or 'no address'}{place}, {self.reason}"


def choose_way(env: Mapping[str, str], meeting_host: str, hostname: str) -> HostAddress:
    """Chooses the address of this host for connections of other hosts.

    Args:
        env: environment variables; `GLOO_SOCKET_IFNAME` names an interface.
        meeting_host: name or address at which the ranks meet; empty: they meet in a file.
        hostname: name of this host.

    Raises:
        ValueError: there is no interface of that name, or it has no address.
    """
    given = env.get(INTERFACE_VARIABLE, "").split(",")[0]
    if given:
        address = address_of(given)
        if not address:
            others = ", ".join(f"{n} ({address_of(n) or 'no address'})" for n in _interfaces())
            raise ValueError(
                f"smp launch: {INTERFACE_VARIABLE}={given}, but host {hostname!r} has no interface "
                f"{given} with an IPv4 address; it has {others}; name one of them that the other "
                f"hosts reach, or remove {INTERFACE_VARIABLE}"
            )
        return HostAddress(address, given, f"which {INTERFACE_VARIABLE} names")
    if meeting_host and (address := _address_towards(meeting_host)):
        reason = f"by which {meeting_host} (MASTER_ADDR) is reached"
        return HostAddress(address, _interface_with(address), reason)
    return HostAddress("", "", "which Gloo chooses by the host name")


def towards(way: HostAddress, addresses: Sequence[str]) -> HostAddress:
    """Replaces a loopback way: the host where the ranks meet reaches itself by loopback.

    Args:
        way: way of this host.
        addresses: addresses of ranks on other machines.
    """
    if way.reason.startswith("which") or not is_loopback(way.address):
        return way
    other = next((a for a in addresses if a and not is_loopback(a)), "")
    address = _address_towards(other) if other else ""
    if not address or is_loopback(address):
        return way
    return HostAddress(address, _interface_with(address), f"by which {other} is reached")


def is_loopback(address: str) -> bool:
    """Returns whether only processes of the same host reach an address."""
    return address.startswith("127.") or address == "::1"


class ReachabilityCheck:
    """Finds, before anything is connected, hosts that do not reach each other.

    The first rank of each machine listens at its address, and tries those of all others.
    """

    def __init__(
        self, store: dist.Store, rank: int, machines: Sequence[str], hosts: Sequence[str]
    ) -> None:
        """
        Args:
            store: keys of this init.
            rank: global rank of this process.
            machines: machine of each rank, equal where loopback connects them.
            hosts: host name of each rank, for errors.
        """
        self._store, self._rank, self._hosts = store, rank, hosts
        self._machines = machines
        self._first_ranks = [r for r, m in enumerate(machines) if m not in machines[:r]]

    def agree(self, ways: Sequence[HostAddress], timeout_s: float) -> list[HostAddress]:
        """Returns the ways that the hosts use in the end. Collective over all ranks.

        Args:
            ways: way of each rank, as the rank has chosen it alone.
            timeout_s: time-out for the other ranks to arrive, in seconds.

        Raises:
            ValueError: on all ranks with the same text: some host cannot reach another one.
        """
        rank = self._rank
        others = [
            way.address
            for way, machine in zip(ways, self._machines, strict=True)
            if machine != self._machines[rank]
        ]
        way = towards(ways[rank], others)
        self._store.set(f"chosen/{rank}", json.dumps(asdict(way)))
        ways = [HostAddress(**json.loads(text)) for text in self._of_all("chosen", timeout_s)]
        verdict = self._try_all(ways) if rank in self._first_ranks else ""
        self._store.set(f"verdict/{rank}", verdict)
        verdicts = [text.decode() for text in self._of_all("verdict", timeout_s)]
        if faults := [text for text in verdicts if text]:
            raise ValueError("smp launch: " + "; ".join(faults))
        return ways

    def _of_all(self, what: str, timeout_s: float) -> list[bytes]:
        """Returns the texts that all ranks have stored under a name, in order of rank."""
        store = dist.PrefixStore(what, self._store)
        keys = [str(rank) for rank in range(len(self._machines))]
        return wait_for_hellos(store, self._rank, keys, timeout_s)

    def _try_all(self, ways: Sequence[HostAddress]) -> str:
        hosts = self._hosts
        own = ways[self._rank]
        try:
            listener = _listen(own.address, len(self._first_ranks))
        except OSError as error:
            self._store.set(f"way/{self._rank}/port", "0")
            return f"host {hosts[self._rank]!r} cannot listen at {own}: {error.strerror}"
        with listener:
            self._store.set(f"way/{self._rank}/port", str(listener.getsockname()[1]))
            others = [rank for rank in self._first_ranks if rank != self._rank]
            ports = {r: int(self._store.get(f"way/{r}/port")) for r in others}
            failed = _connect_all(own.address, {r: (ways[r].address, ports[r]) for r in others})
            # Other hosts connect to this listener until they have finished.
            self._store.add("way/tried", 1)
            deadline_s = time.monotonic() + 2 * _ANSWER_S
            while self._store.add("way/tried", 0) < len(self._first_ranks):
                if time.monotonic() > deadline_s:
                    break
                time.sleep(0.01)
        return "; ".join(
            f"host {hosts[self._rank]!r} at {own}, does not reach host {hosts[r]!r} at {ways[r]}: "
            f"{why}; connect them, open the ports between them, or name the right interface "
            f"({INTERFACE_VARIABLE})"
            for r, why in failed.items()
        )


def _listen(address: str, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def _connect_all(own: str, places: Mapping[int, tuple[str, int]]) -> dict[int, str]:
    """Returns the places that do not answer, and why."""
    failed: dict[int, str] = {}
    selector = selectors.DefaultSelector()
    for rank, place in places.items():
        if place[1] == 0:
            continue  # that rank cannot listen, and has reported why
        trying = socket.socket(socket.AF_INET6 if ":" in own else socket.AF_INET)
        trying.setblocking(False)
        try:
            trying.bind((own, 0))
            code = trying.connect_ex(place)
        except OSError as error:
            code = error.errno or errno.EINVAL
        if code in (0, errno.EINPROGRESS):
            selector.register(trying, selectors.EVENT_WRITE, rank)
        else:
            failed[rank] = os.strerror(code)
            trying.close()
    deadline_s = time.monotonic() + _ANSWER_S
    while selector.get_map() and time.monotonic() < deadline_s:
        for key, _ in selector.select(max(0.0, deadline_s - time.monotonic())):
            assert isinstance(key.fileobj, socket.socket)
            code = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                failed[key.data] = os.strerror(code)
            selector.unregister(key.fileobj)
            key.fileobj.close()
    for key in list(selector.get_map().values()):
        assert isinstance(key.fileobj, socket.socket)
        failed[key.data] = f"no answer within {_ANSWER_S:g} s"
        key.fileobj.close()
    selector.close()
    return failed


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def address_of(interface: str) -> str:
    """Returns the IPv4 address of an interface; empty if it has none or does not exist."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _interface_with(address: str) -> str:
    return next((name for name in _interfaces() if address_of(name) == address), "")


def _address_towards(host: str) -> str:
    """Returns the own address from which the system would send to a host; sends nothing."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, place in found:
        with socket.socket(family, kind, protocol) as asking:
            try:
                asking.connect(place)
            except OSError:
                continue
            return str(asking.getsockname()[0])
    return ""
