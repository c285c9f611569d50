"""Scripts as users of the v1 interface write them, over two hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.running import Client
from tests.dist.pool import Pool
from tests.hosts.network import Network, why_not
from tests.hosts.ranks import HostRanks

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

# Stages on different hosts, and replicas.
PARAMETERS = {"partitions": 2, "microbatches": 4, "ddp": True, "placement_strategy": "PDT"}


def check_equal(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert (result["mp_rank"], result["dp_rank"]) == (expected["mp_rank"], expected["dp_rank"])
    assert result["correct"] == expected["correct"] and len(result["losses"]) == 6


@pytest.mark.sample(keep=0)
def test_client_f_learns_the_same_over_two_hosts_and_resumes(pool: Pool, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    expected = Client(pool, here, "client_f.py").run(4, parameters=PARAMETERS)
    with Network(2) as network:
        client = Client(pool, there, "client_f.py", hosts=HostRanks(network, pool, 2))
        results = client.run(4, parameters=PARAMETERS)
        sent = [network.traffic(index).sent for index in range(2)]
        again = client.run(4, {"resume": 1, "epochs": 1}, PARAMETERS)
    for result, one in zip(results, expected, strict=True):
        check_equal(result, one)
    assert {result["mp_rank"] for result in results[:2]} == {0}, "the first host has one stage"
    assert min(sent) > 50_000, f"hosts have sent {sent} bytes: nothing was distributed"
    assert again[0]["losses"][0] < results[0]["losses"][0], "it goes on with what it has learned"
