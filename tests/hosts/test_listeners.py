"""Listeners of ranks on several hosts use the addresses by which the hosts reach each other."""

from __future__ import annotations

import os
import socket
import struct

import pytest

import smp
from tests.dist import test_strangers
from tests.dist.pool import Pool
from tests.hosts.network import Network, why_not
from tests.hosts.ranks import HostRanks

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


def where_it_listens(rank: int) -> list[str]:
    found = test_strangers.start(
        rank, {int(os.environ["MASTER_PORT"])}
    )  # the store has all addresses
    smp.barrier()
    addresses = [struct.pack("<I", int(at, 16)) for at in found.values() if len(at) == 8]
    assert len(addresses) == len(found), f"at addresses of IPv6, or all: {found}"
    return [socket.inet_ntoa(address) for address in addresses]


def test_ranks_listen_at_the_address_of_their_host_alone(pool: Pool) -> None:
    with Network(2) as network:
        found = HostRanks(network, pool).run(2, where_it_listens)
        own = [network.address(index) for index in range(2)]
    # Rank 0 has the hub, too.
    assert found == [[own[0], own[0]], [own[1]]]
