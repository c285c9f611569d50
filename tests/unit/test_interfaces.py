"""The address that a host gives to the others."""

from __future__ import annotations

import os

import pytest

from smp.world.interfaces import HostAddress, choose_way, is_loopback, towards
from smp.world.process_groups import _gloo_settings


def test_a_named_interface_wins() -> None:
    way = choose_way({"GLOO_SOCKET_IFNAME": "lo,eth7"}, "10.1.2.3", "here")
    assert (way.address, way.interface) == ("127.0.0.1", "lo")
    assert str(way) == "127.0.0.1 (lo), which GLOO_SOCKET_IFNAME names"


def test_an_interface_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"'here' has no interface eth77 .* lo \(127\.0\.0\.1\)"):
        choose_way({"GLOO_SOCKET_IFNAME": "eth77"}, "", "here")


def test_the_way_to_the_meeting_point_is_taken() -> None:
    way = choose_way({}, "127.0.0.1", "here")
    assert (way.address, way.interface) == ("127.0.0.1", "lo")
    assert "127.0.0.1 (MASTER_ADDR) is reached" in way.reason


@pytest.mark.parametrize("meeting", ["", "no-such-host.invalid"])
def test_without_a_meeting_point_it_is_left_to_gloo(meeting: str) -> None:
    way = choose_way({}, meeting, "here")
    assert (way.address, way.interface) == ("", "")


def test_the_host_of_the_meeting_point_takes_the_way_to_the_others() -> None:
    """Meets at a loopback address: /etc/hosts of Debian often gives one to the host's own name."""
    meeting = HostAddress("127.0.1.1", "lo", "by which host0 (MASTER_ADDR) is reached")
    assert towards(meeting, ["", "127.0.0.2"]) == meeting, "nobody to go to"
    assert towards(HostAddress("10.0.0.1", "eth0", "by which"), ["10.0.0.2"]).address == "10.0.0.1"
    named = HostAddress("127.0.0.1", "lo", "which GLOO_SOCKET_IFNAME names")
    assert towards(named, ["10.0.0.2"]) == named


def test_loopback_is_told_by_its_address() -> None:
    assert is_loopback("127.0.1.1") and is_loopback("::1")
    assert not is_loopback("10.231.0.1") and not is_loopback("")


@pytest.mark.parametrize(
    ("named", "loopback", "expected"),
    [
        (None, True, "lo"), (None, False, None), ("eth77", True, "lo"), ("eth77", False, "eth77"),
        ("lo,eth7", True, "lo,eth7"),
    ],
)  # fmt: skip
def test_groups_on_one_machine_need_no_interface_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, named: str | None, loopback: bool, expected: str | None
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if named is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    before = dict(os.environ)
    with _gloo_settings(loopback):
        assert os.environ.get("GLOO_SOCKET_IFNAME") == expected
        assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"
    assert dict(os.environ) == before
