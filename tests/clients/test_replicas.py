"""Scripts for the data-parallel library of the service run as they are."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from tests.clients.running import Client
from tests.dist.pool import Pool

SCRIPT = "replicas.py"


def meeting() -> dict[str, str]:
    """Returns where torch's ranks meet; ranks of smp would otherwise find each other in a file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected) == [
        *("conv.weight", "conv.bias", "head.weight", "head.bias")
    ]  # fmt: skip
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-12, abs=1e-14), name


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("interface", ["old", "backend"])
@pytest.mark.parametrize("accumulate", [0, 1])
def test_replicas_equal_one_process(
    pool: Pool, tmp_path: Path, interface: str, accumulate: int
) -> None:
    client = Client(pool, tmp_path, SCRIPT)
    argv = {"interface": interface, "accumulate": accumulate}
    (one,) = client.run(1, argv, more_env=meeting())
    two = client.run(2, argv, more_env=meeting())
    argv["accumulate"] = 1 - accumulate
    (other_steps,) = client.run(1, argv, more_env=meeting())
    for rank, result in enumerate(two):
        check_equal(result["parameters"], one["parameters"])
        assert result["parameters"] == two[0]["parameters"], "replicas have the same bits"
        assert (result["rank"], result["total"]) == (rank, 3.0)
        assert (result["gathered"], result["shared"]) == ([0.0, 1.0], 5.0)
    with pytest.raises(AssertionError):  # so it can be seen when numbers differ
        check_equal(other_steps["parameters"], one["parameters"])


def test_smp_run_starts_scripts_of_the_old_interface(pool: Pool, tmp_path: Path) -> None:
    client = Client(pool, tmp_path, SCRIPT, launcher="smp run")
    assert [one["total"] for one in client.run(2, {})] == [3.0, 3.0]
