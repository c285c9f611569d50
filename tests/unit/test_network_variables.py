"""Variables of the network that contradict the machine or each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from smp_cli.doctor.hosts import Host, differences, pairs_of, report
from smp_cli.doctor.network_variables import find_conflicts, network_variables
from smp_cli.doctor.pairs import Pair

INTERFACES = {"lo", "eth0", "eth1", "docker0"}


@pytest.mark.parametrize(
    ("env", "devices", "complaint"),
    [
        ({"NCCL_SOCKET_IFNAME": "ens"}, [], "this host has no such interface"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, [], "this host has no such interface"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, [], ""),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, [], ""),
        ({"NCCL_SOCKET_IFNAME": "lo"}, [], "does not lead to other hosts"),
        ({"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth0"}, [], "different interfaces"),
        ({"FI_PROVIDER": "efa"}, [], "has no EFA device"),
        ({"FI_PROVIDER": "efa"}, ["rdmap0s6"], ""),
        ({"NCCL_NET": "Socket"}, ["efa_0"], "is not used"),
        ({"NCCL_PROTO": "LL128"}, ["efa_0"], "corrupt data"),
        ({"NCCL_PROTO": "LL128"}, [], ""),
        ({"NCCL_IB_DISABLE": "1"}, ["mlx5_0"], "InfiniBand device of this host is not used"),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, [], "over the network"),
        ({"NCCL_DEBUG": "INFO"}, [], ""),
    ],
)
def test_conflicts(tmp_path: Path, env: dict[str, str], devices: list[str], complaint: str) -> None:
    for device in devices:
        (tmp_path / "sys" / "class" / "infiniband" / device).mkdir(parents=True)
    found = find_conflicts(env, INTERFACES, tmp_path)
    assert len(found) == (1 if complaint else 0), found
    assert complaint in "".join(found)


def test_only_variables_of_the_network_are_shown() -> None:
    assert network_variables({"NCCL_A": "1", "FI_B": "2", "HOME": "/"}) == {
        "FI_B": "2",
        "NCCL_A": "1",
    }


def host(name: str, torch: str = "2", **variables: str) -> Host:
    way = {"address": "10.0.0.1", "interface": "eth0", "reason": "why"}
    return Host(name, name, way, {"torch": torch}, {}, variables)


def test_differences_name_values_and_hosts() -> None:
    hosts = [host("a"), host("b", "3"), host("c", NCCL_DEBUG="INFO")]
    assert differences(hosts) == [
        "torch differs: 2 on a, c; 3 on b; make it the same everywhere",
        "NCCL_DEBUG differs: not set on a, b; INFO on c; make it the same everywhere",
    ]
    assert differences([host("a"), host("b")]) == []


def test_slow_pairs_and_clocks_are_problems() -> None:
    hosts = [host("a"), host("b"), host("c")]
    measured: dict[tuple[int, int], Pair | str] = {
        (0, 1): Pair(1e-4, 1e8, 0.0),
        (0, 2): Pair(1e-4, 1e8, -3.0),
        (1, 2): Pair(1e-4, 1e7, 0.0),
    }
    problems = report(hosts, measured)[-1].problems
    assert problems == [
        "a - c: the clocks are 3.0 s apart; set them (chrony, ntp)",
        "b - c: 10 MB/s, the median of all pairs is 100; check the cable, switch or interface",
    ]


def test_many_hosts_are_not_measured_pair_by_pair() -> None:
    assert len(pairs_of(8)) == 28
    pairs = pairs_of(100)
    assert len(pairs) == 197 and len(set(pairs)) == 197
    assert {host for pair in pairs for host in pair} == set(range(100))
