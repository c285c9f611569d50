"""The server that `smp doctor --hosts` measures pairs of hosts with."""

from __future__ import annotations

import socket

import pytest
from smp_cli.doctor import pairs
from smp_cli.doctor.pairs import Server, measure

import smp._C as _C

SECRET = b"a secret that only these tests know"


def test_a_pair_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_LONGEST_SENDING_S", 0.1)
    with Server("127.0.0.1", SECRET) as server:
        pair = measure("127.0.0.1", "127.0.0.1", server.port, SECRET)
    assert pair.round_trip_s > 0 and pair.bytes_per_s > 0
    assert abs(pair.ahead_s) < 1.0  # it is one clock


def test_strangers_get_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_HELLO_S", 0.2)
    monkeypatch.setattr(pairs, "_LONGEST_SENDING_S", 0.1)
    with Server("127.0.0.1", SECRET) as server:
        # An answer is 8 bytes of the time, for an "a"; a challenge is no answer.
        opening = _C.Handshake.caller(b"another secret, as long as it is", "doctor", 0).advance(
            b""
        )[1]
        for noise in (b"", b"a" * 48, b"a" * 100, b"a" * 10, opening + b"a" * 100, opening):
            with socket.create_connection(("127.0.0.1", server.port), 5.0) as stranger:
                stranger.sendall(noise)
                try:
                    heard = b"".join(iter(lambda: stranger.recv(100), b""))
                    assert len(heard) == (64 if noise == opening else 0)
                except ConnectionError:  # closed with bytes of ours unread
                    pass
        with pytest.raises(OSError, match="does not know the secret"):
            measure("127.0.0.1", "127.0.0.1", server.port, b"another secret, as long as it is")
        assert measure("127.0.0.1", "127.0.0.1", server.port, SECRET).round_trip_s > 0
