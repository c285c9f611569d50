"""``smp doctor --hosts`` measures the links that a network really has, and says what is wrong."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.dist.pool import Pool
from tests.dist.processes import Ended
from tests.hosts.network import Network, why_not
from tests.hosts.ranks import REPO, HostRanks

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

SCRIPT = REPO / "python" / "smp_cli" / "doctor" / "hosts.py"


def sections_of(results: list[Ended]) -> dict[str, Any]:
    text = results[0].output
    found: dict[str, Any] = json.loads(text[text.index("{") :])
    return found


def problems_of(results: list[Ended]) -> str:
    problems = [p for section in sections_of(results).values() for p in section["problems"]]
    status = 1 if problems else 0
    assert [one.returncode for one in results] == [status] * len(results), results[0].output
    return "\n".join(problems)


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("mbit", [80.0, 400.0])
def test_the_links_are_measured_as_they_are(pool: Pool, mbit: float) -> None:
    with Network(3, mbit=mbit) as network:
        results = HostRanks(network, pool, 2).run_script(SCRIPT, ["--json"])
    sections = sections_of(results)
    pairs = sections["pairs of hosts"]["values"]
    assert list(pairs) == ["host0 - host1", "host0 - host2", "host1 - host2"]
    for text in pairs.values():
        rate = float(re.search(r"(\d+) MB/s", text)[1])  # type: ignore[index]
        assert 0.7 * mbit / 8 < rate < 1.2 * mbit / 8 + 2, text
        assert re.search(r"clock [+-]\d\.\d ms", text), text
    host = sections["host host1"]["values"]
    assert host["address"] == "10.231.0.2 (eth0), by which 10.231.0.1 (MASTER_ADDR) is reached"
    assert "TMPDIR" in host["free"] and "torch" in host["versions"]
    assert not re.search("clock|reach|slow|differs", problems_of(results))


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("wrong", ["pair", "variable", "interface"])
def test_what_is_wrong_is_named(pool: Pool, wrong: str) -> None:
    settings = {
        "pair": {},
        "variable": {"NCCL_SOCKET_IFNAME": "ens"},
        "interface": {"GLOO_SOCKET_IFNAME": "eth9"},
    }[wrong]
    with Network(3) as network:
        if wrong == "pair":
            network.part(1, 2)
        results = HostRanks(network, pool).run_script(
            SCRIPT, ["--json"], env_of=lambda rank: settings if rank == 2 else {}
        )
    problems = problems_of(results)
    expected = {
        "pair": "host1 at 10.231.0.2 .*does not reach host2 at 10.231.0.3 .*timed out",
        "variable": "NCCL_SOCKET_IFNAME=ens, but this host has no such interface",
        "interface": "'host2' has no interface eth9",
    }[wrong]
    assert re.search(expected, problems), problems
    if wrong == "variable":
        assert "NCCL_SOCKET_IFNAME differs: not set on host0, host1; ens on host2" in problems
