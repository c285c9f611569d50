"""A stranger without a job's secret gets nothing from its ports, and does not disturb it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch

import smp
import smp._C as _C
from tests.dist.pool import Pool, RankFailure

GIVEN = "a secret that only these tests know"
LISTENS = "0A"


def own_listeners() -> dict[int, str]:
    """Address in hexadecimal of each TCP port that this process listens at."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(entry))
        except OSError:  # that of the listing
            continue
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in own:
                address, port = words[1].split(":")
                found[int(port, 16)] = address
    return found


def start(rank: int, before: set[int], **env: str) -> dict[int, str]:
    """Begins, and returns the listeners that are of smp."""
    os.environ.update(SMP_TRANSPORT="tcp", SMP_SHM="0", SMP_LOG_LEVEL="warning", **env)
    smp.init({"partitions": 2, "microbatches": 2})
    smp.barrier()
    return {port: at for port, at in own_listeners().items() if port not in before}


def end() -> None:
    for name in ("SMP_TRANSPORT", "SMP_SHM", "SMP_LOG_LEVEL", "SMP_JOB_SECRET"):
        os.environ.pop(name, None)


def train() -> float:
    torch.manual_seed(7)
    model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model: smp.DistributedModel, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for _ in range(3):
        loss = step(model, torch.ones(4, 4)).reduce_mean().item()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss)


def strangers_of(port: int) -> list[socket.socket]:
    """Connections that send garbage, a frame, an opening of another job, and nothing."""
    opening = _C.Handshake.caller(b"the secret of some other job ...", "liveness", 1).advance(b"")
    words = [
        b"\xff" * 100_000,
        b"GET / HTTP/1.1\r\n\r\n",
        opening[1] + bytes(1000),
        opening[1],
        b"",
    ]
    connections = []
    for one in words:
        stranger = socket.create_connection(("127.0.0.1", port), 5.0)
        try:
            stranger.sendall(one)
        except ConnectionError:  # closed before all of it was there
            pass
        connections.append(stranger)
    return connections


def heard_until_closed(stranger: socket.socket) -> int:
    """Bytes that it got; raises when it is not closed in time."""
    stranger.settimeout(20.0)
    try:
        return len(b"".join(iter(lambda: stranger.recv(4096), b"")))
    except ConnectionError:
        return 0


def train_among_strangers(rank: int, given: str | None) -> tuple[float, list[str], list[int]]:
    before = set(own_listeners())
    listeners = start(rank, before, **({"SMP_JOB_SECRET": given} if given else {}))
    try:
        smp_ports = list(listeners)
        strangers = [one for port in smp_ports for one in strangers_of(port)]
        loss = train()
        heard = [heard_until_closed(one) for one in strangers]
        strangers += [one for port in smp_ports for one in strangers_of(port)]
        assert train() == loss  # of the same model and data
        smp.barrier()
        for one in strangers:
            one.close()
        return loss, list(listeners.values()), heard
    finally:
        end()


@pytest.mark.sample(keep=0)
@pytest.mark.waits
@pytest.mark.parametrize("given", [None, GIVEN])
def test_strangers_hear_nothing_and_disturb_nobody(pool: Pool, given: str | None) -> None:
    results = pool.run(2, train_among_strangers, given)
    assert results[0][0] > 0 and len({loss for loss, _, _ in results}) == 1
    # Rank 0 has the hub, both have a port for peers: at 127.0.0.1, all ranks being here.
    assert [len(addresses) for _, addresses, _ in results] == [2, 1]
    for _, addresses, heard in results:
        assert set(addresses) == {"0100007F"}
        # The answer to a right opening is a nonce and a proof; all others hear nothing.
        assert set(heard) == {0, 64} and heard.count(64) == len(addresses)


def begin_with(rank: int, secrets: list[str]) -> None:
    try:
        start(rank, set(), **({"SMP_JOB_SECRET": secrets[rank]} if secrets[rank] else {}))
    finally:
        end()


def test_ranks_with_different_secrets_are_refused_on_all_of_them(pool: Pool) -> None:
    for secrets, why in (
        ([GIVEN, GIVEN[::-1]], r"of ranks \[1\] differs from that of rank 0"),
        ([GIVEN, ""], r"ranks \[1\] have no SMP_JOB_SECRET"),
        ([GIVEN, "short"], r"the secret in SMP_JOB_SECRET has 5 bytes.*on ranks \[1\] of 2"),
    ):
        with pytest.raises(RankFailure, match=why):
            pool.run(2, begin_with, secrets)


def meet_at_a_port(rank: int, port: int) -> str:
    names = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    before = {name: os.environ.get(name) for name in (*names, "SMP_RENDEZVOUS")}
    os.environ.update(names)
    os.environ.pop("SMP_RENDEZVOUS", None)
    try:
        smp.init({"ddp": True})
        smp.barrier()
        return own_listeners().get(port, "")
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text


def test_the_store_of_a_job_of_one_host_listens_on_loopback(pool: Pool) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert pool.run(2, meet_at_a_port, port) == ["0100007F", ""]
