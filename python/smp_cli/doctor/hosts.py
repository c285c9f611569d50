"""``smp doctor --hosts``: checks all hosts before a job begins, started by the job's launcher.

One process per host is enough; of several, the first on each host measures. Rank 0 prints.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from smp._version import __version__
from smp.world.interfaces import HostAddress, choose_way, is_loopback, towards
from smp.world.job_secret import check_same_secret, fingerprint, given_secret, share_secret
from smp.world.launch import Launch, read_launch
from smp.world.presence import wait_for_hellos
from smp.world.rendezvous import MeetingPoint, machine_id
from smp_cli.doctor.network_variables import find_conflicts, network_variables
from smp_cli.doctor.pairs import Pair, Server, measure
from smp_cli.doctor.report import Section, gib, print_report

_TIMEOUT_S = 120.0
_MIN_FREE = 5 << 30
_MOST_APART_S = 1.0  # of wall clocks: otherwise logs and file times mislead
# Up to this many hosts every pair is measured; else the first with each, and each with the next.
_MAX_ALL_PAIRS = 8
_SLOW = 0.5  # share of the median bandwidth


@dataclass
class Host:
    """Facts that one host reports about itself."""

    name: str
    machine: str
    way: dict[str, str]
    versions: dict[str, str]
    free: dict[str, int]
    variables: dict[str, str]
    problems: list[str] = field(default_factory=list)
    port: int = 0
    secret: str = ""
    """Fingerprint of the secret that the environment gives."""


def look(launch: Launch, meeting_host: str, env: Mapping[str, str]) -> Host:
    """Returns facts about this host."""
    problems = find_conflicts(env, {name for _, name in socket.if_nameindex()}, Path("/"))
    way = HostAddress("", "", "none")
    try:
        way = choose_way(env, meeting_host, launch.hostname)
    except ValueError as error:
        problems.append(str(error))
    folders = {"TMPDIR": tempfile.gettempdir(), "/dev/shm": "/dev/shm"}
    free = {name: shutil.disk_usage(folder).free for name, folder in folders.items()}
    if free["TMPDIR"] < _MIN_FREE:
        problems.append(f"TMPDIR has only {gib(free['TMPDIR'])} free")
    return Host(
        launch.hostname,
        machine_id(launch.hostname),
        asdict(way),
        versions={
            "smp": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        free=free,
        variables=network_variables(env),
        problems=problems,
    )


def pairs_of(num_hosts: int) -> list[tuple[int, int]]:
    """Returns the pairs of hosts that are measured."""
    numbers = range(num_hosts)
    if num_hosts <= _MAX_ALL_PAIRS:
        return [(one, other) for one in numbers for other in numbers[one + 1 :]]
    return [(0, other) for other in numbers[1:]] + [(i, i + 1) for i in numbers[1:-1]]


def differences(hosts: Sequence[Host]) -> list[str]:
    """Describes versions and variables that are not the same on all hosts."""
    facts = [host.versions | host.variables for host in hosts]
    found = []
    for name in dict.fromkeys(name for one in facts for name in one if name != "kernel"):
        by_value: dict[str, list[str]] = {}
        for host, one in zip(hosts, facts, strict=True):
            by_value.setdefault(one.get(name, "not set"), []).append(host.name)
        if len(by_value) > 1:
            words = "; ".join(f"{value} on {', '.join(on)}" for value, on in by_value.items())
            found.append(f"{name} differs: {words}; make it the same everywhere")
    return found


def report(hosts: Sequence[Host], measured: Mapping[tuple[int, int], Pair | str]) -> list[Section]:
    """Returns the sections to print: one per host and one for the pairs.

    Args:
        hosts: hosts that are different machines.
        measured: results by pair of hosts; a text if one host did not reach the other.
    """
    sections = []
    for host in hosts:
        values = {
            "address": str(HostAddress(**host.way)),
            "versions": host.versions,
            "free": {name: gib(free) for name, free in host.free.items()},
            "variables": host.variables,
        }
        sections.append(Section(f"host {host.name}", values, list(host.problems)))
    pairs = Section("pairs of hosts", {}, differences(hosts))
    rates = sorted(one.bytes_per_s for one in measured.values() if isinstance(one, Pair))
    for (one, other), found in measured.items():
        name = f"{hosts[one].name} - {hosts[other].name}"
        if isinstance(found, str):
            pairs.values[name] = "no connection"
            pairs.problems.append(found)
            continue
        pairs.values[name] = (
            f"round trip {found.round_trip_s * 1e6:.0f} us, {found.bytes_per_s / 1e6:.0f} MB/s, "
            f"clock {found.ahead_s * 1e3:+.1f} ms"
        )
        if found.bytes_per_s < _SLOW * rates[len(rates) // 2]:
            pairs.problems.append(
                f"{name}: {found.bytes_per_s / 1e6:.0f} MB/s, the median of all pairs is "
                f"{rates[len(rates) // 2] / 1e6:.0f}; check the cable, switch or interface"
            )
        if abs(found.ahead_s) > _MOST_APART_S:
            pairs.problems.append(
                f"{name}: the clocks are {abs(found.ahead_s):.1f} s apart; set them (chrony, ntp)"
            )
    return [*sections, pairs]


def _measure_all(
    store: dist.Store, own: int, hosts: Sequence[Host], secret: bytes
) -> dict[tuple[int, int], Pair | str]:
    """Measures pair after pair, each by its first host, and shares the results with all hosts."""
    measured: dict[tuple[int, int], Pair | str] = {}
    for one, other in pairs_of(len(hosts)):
        key = f"pair/{one}/{other}"
        if own == one:
            here, there = hosts[one], hosts[other]
            try:
                pair = measure(here.way["address"], there.way["address"], there.port, secret)
                store.set(key, json.dumps(asdict(pair)))
            except OSError as error:
                text = (
                    f"{here.name} at {HostAddress(**here.way)}, does not reach {there.name} at "
                    f"{HostAddress(**there.way)}: {error}; open the ports between them, or name "
                    "the right interface (GLOO_SOCKET_IFNAME)"
                )
                store.set(key, json.dumps(text))
        found = json.loads(store.get(key))
        measured[one, other] = found if isinstance(found, str) else Pair(**found)
    return measured


def main() -> int:
    """Checks all hosts; returns 1 on all of them if there is a problem."""
    env = os.environ
    launch = read_launch(env, socket.gethostname())
    if launch.world_size == 1:
        print(
            "smp doctor --hosts: this is one process; start it on each host with the launcher of "
            "the job, for instance torchrun --nnodes=2 --nproc-per-node=1 ... -m smp_cli doctor "
            "--hosts",
            file=sys.stderr,
        )
        return 2
    point, rank = MeetingPoint(), launch.global_rank
    store = point.open(launch, env, _TIMEOUT_S)

    def exchange(what: str, host: Host) -> list[Host]:
        own = dist.PrefixStore(what, store)
        own.set(str(rank), json.dumps(asdict(host)))
        keys = [str(other) for other in range(launch.world_size)]
        texts = wait_for_hellos(own, rank, keys, _TIMEOUT_S)
        return [Host(**json.loads(text)) for text in texts]

    host = look(launch, point.host, env)
    given = None
    try:
        given = given_secret(env)
    except ValueError as error:
        host.problems.append(str(error))
    host.secret = fingerprint(given)
    said = exchange("facts", host)
    others = [one.way["address"] for one in said if one.machine != host.machine]
    host.way = asdict(way := towards(HostAddress(**host.way), others))
    machines = [one.machine for one in said]
    first_ranks = [r for r, machine in enumerate(machines) if machine not in machines[:r]]
    if len(first_ranks) > 1 and (not way.address or is_loopback(way.address)):
        host.problems.append(f"no address that other hosts reach: {way}; set GLOO_SOCKET_IFNAME")
    try:
        check_same_secret([one.secret for one in said])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    secret = share_secret(store, rank, given)
    is_asked = len(first_ranks) > 1 and way.address
    with Server(way.address if is_asked else "127.0.0.1", secret) as server:
        host.port = server.port
        said = exchange("servers", host)
        hosts = [said[r] for r in first_ranks]
        own = first_ranks.index(rank) if rank in first_ranks else -1
        measured = _measure_all(store, own, hosts, secret)
        sections = report(hosts, measured)
        store.add("end", 1)
        deadline_s = time.monotonic() + _TIMEOUT_S
        # Rank 0 holds the store, so it ends last.
        while rank == 0 and store.add("end", 0) < len(said) and time.monotonic() < deadline_s:
            time.sleep(0.02)
    if rank == 0:
        print_report(sections, "--json" in sys.argv)
    return int(any(one.problems for one in sections))


if __name__ == "__main__":
    sys.exit(main())
