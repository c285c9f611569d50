"""Measures round trip, bandwidth and clock difference between two hosts."""

from __future__ import annotations

import socket
import statistics
import struct
import threading
import time
from dataclasses import dataclass
from typing import IO

import smp._C as _C

_ANSWER_S = 5.0
_NUM_ASKED = 40
_CHUNK_BYTES = 1 << 20
_LONGEST_SENDING_S = 2.0
_MOST_BYTES = 64 << 20
_ASK, _SEND, _END = b"a", b"s", b"e"
_PURPOSE = "doctor"
_HELLO_S = 2.0


@dataclass(frozen=True)
class Pair:
    """The results of measuring a pair of hosts."""

    round_trip_s: float
    bytes_per_s: float
    ahead_s: float
    """Seconds by which the other wall clock is ahead; wrong by half a round trip at most."""


class Server:
    """Answers the questions of other hosts, one after the other, while the block lasts.

    A caller that does not first prove that it has the secret gets no answer. The proof is that
    of all connections of a job: `csrc/health/handshake.h`.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self._secret = secret
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with connection:
                connection.settimeout(_HELLO_S)
                try:
                    first = _prove(connection, _C.Handshake.listener(self._secret, _PURPOSE))
                    connection.settimeout(2 * _ANSWER_S)
                    _answer(connection, first)
                except OSError:
                    pass  # the other side reports it


def _prove(connection: socket.socket, handshake: _C.Handshake) -> bytes:
    """Exchanges proofs, and returns the bytes that came after the proof of the other side."""
    received = b""
    while True:
        try:
            used, answer = handshake.advance(received)
        except RuntimeError as error:
            raise OSError(str(error)) from None
        received = received[used:]
        connection.sendall(answer)
        if handshake.is_proven:
            return received
        piece = connection.recv(_CHUNK_BYTES)
        if not piece:
            raise OSError("closed before both sides had proved the secret")
        received += piece


def _answer(connection: socket.socket, first: bytes) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while command := first or connection.recv(1):  # the caller waits for each answer
        first = b""
        if command == _ASK:
            connection.sendall(struct.pack("!d", time.time()))
        elif command == _SEND:
            while not connection.recv(_CHUNK_BYTES).endswith(_END):
                pass
            connection.sendall(_END)


def measure(own: str, address: str, port: int, secret: bytes) -> Pair:
    """Measures the connection to the server of another host.

    Args:
        own: address of this host, from which to connect.
        address: address of the other host.
        port: port of its server.
        secret: secret of the server.

    Raises:
        OSError: the server does not answer, or has another secret.
    """
    with socket.create_connection((address, port), _ANSWER_S, (own, 0)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _prove(connection, _C.Handshake.caller(secret, _PURPOSE, 0))
        answers = connection.makefile("rb")
        asked = [_ask(connection, answers) for _ in range(_NUM_ASKED)]
        started_s = time.perf_counter()
        connection.sendall(_SEND)
        data, num_bytes = b"x" * _CHUNK_BYTES, 0
        while num_bytes < _MOST_BYTES and time.perf_counter() - started_s < _LONGEST_SENDING_S:
            connection.sendall(data)
            num_bytes += len(data)
        connection.sendall(_END)
        connection.settimeout(60.0)  # buffered data have to get through
        if answers.read(1) != _END:
            raise OSError("the connection closed in the middle")
        sent_s = time.perf_counter() - started_s
    quickest = min(asked)
    return Pair(statistics.median(took for took, _ in asked), num_bytes / sent_s, quickest[1])


def _ask(connection: socket.socket, answers: IO[bytes]) -> tuple[float, float]:
    """Returns the seconds until the answer, and how far its clock is ahead of their middle."""
    before, started_s = time.time(), time.perf_counter()
    connection.sendall(_ASK)
    answer = answers.read(8)
    took_s = time.perf_counter() - started_s
    if len(answer) < 8:
        raise OSError("the connection closed in the middle")
    (there,) = struct.unpack("!d", answer)
    return took_s, there - (before + took_s / 2)
