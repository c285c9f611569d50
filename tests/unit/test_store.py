"""``smp store``, and what a process does whose store is gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist
from smp_cli.store import StoreProcess

from smp.world.sockets import end_silent_connections, with_own_connection
from tests.patience import PATIENCE_S


@pytest.fixture(name="server")
def _server() -> Iterator[StoreProcess]:
    server = StoreProcess("127.0.0.1")
    yield server
    server.close()


def test_processes_meet_in_a_store_until_it_ends(server: StoreProcess) -> None:
    host, _, port = server.url().removeprefix("tcp://").partition(":")
    one, other = (
        dist.TCPStore(host, int(port), 2, False, timedelta(seconds=30), wait_for_workers=False)
        for _ in range(2)
    )
    one.set("key", "value")
    assert other.get("key") == b"value"
    assert len(_timeouts_ms(int(port))) >= 2 and not any(_timeouts_ms(int(port)))
    end_silent_connections(int(port))
    assert set(_timeouts_ms(int(port))) == {15000}
    assert other.get("key") == b"value"
    server.close()
    with pytest.raises(dist.DistError):
        other.get("key")


def test_a_thread_that_waits_for_a_key_holds_up_no_other(server: StoreProcess) -> None:
    host, _, port = server.url().removeprefix("tcp://").partition(":")
    limit = timedelta(seconds=60)
    root = dist.TCPStore(host, int(port), 1, False, limit, wait_for_workers=False)
    store = dist.PrefixStore("smp", dist.PrefixStore("init", root))

    def wait_for_ever() -> None:
        with suppress(dist.DistError):  # the store ends with the test
            store.get("never")

    threading.Thread(target=wait_for_ever, daemon=True).start()
    time.sleep(0.2)
    own = with_own_connection(store)
    request = threading.Thread(target=lambda: own.set("key", "value"), daemon=True)
    request.start()
    request.join(PATIENCE_S)
    assert not request.is_alive() and own.get("key") == b"value"
    assert own.clone().get("key") == b"value", "in the same place"
    other = dist.HashStore()
    assert with_own_connection(other) is other


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "smp_cli", "store", "--address", "127.0.0.1"]
        done = subprocess.run([*command, "--port", port], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"cannot listen at 127.0.0.1, port {port}: " in done.stdout and "--port" in done.stdout


def _timeouts_ms(port: int) -> list[int]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            own = socket.socket(fileno=os.dup(int(number)))
        except OSError:
            continue
        with own, suppress(OSError, IndexError):
            if own.getpeername()[1] == port:
                found.append(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return found
