"""The hub of a job with thousands of ranks: the real one, and ranks that only talk to it.

    python benchmarks/control_plane.py --ranks 128 1024 8192    # JSON lines on the standard output

The hub (`csrc/health/liveness_hub.cpp`) runs in a process of its own. Another one is all ranks: a
connection each, by which it says what a rank says, as often, and answers as a rank does. So what
the hub has to do is real, and what a rank does beside it is not there.

Measured are, with the seconds of the hub's thread (`hub_cpu_s`) and messages both ways:
`join`, until all are welcome; `steady`, while each says once per second how it is, which is all
that a training step costs the hub; `stop`, from one rank that asks until all know where they stop;
`fault`, from one rank that fails until all know; `leave`, from the first goodbye until all know
that all have said theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import smp._C as _C

_LIMIT_S = 120.0
_SECRET = b"of no job, for ranks of a benchmark"
_PURPOSE = "liveness"  # kHubPurpose in csrc/health/liveness_frame.h
_STATUS_EVERY_S = 1.0  # LivenessClient::Options::status_every
_SLOTS = 50  # into which the ranks of a second fall
# `LivenessFrame` and its `Prefix` in csrc/health/liveness_frame.
_PREFIX = struct.Struct("=IIIIiIqqqBBB5x")
(_HELLO, _WELCOME, _REFUSED, _STATUS, _RAISED, _RAISED_SEEN, _LEFT) = range(1, 8)
(_STOP_ASKED, _FREEZE, _FROZEN, _STOP_AT) = range(11, 15)
_LEFT_RANKS = 20
_WHERE = b"step 12, module h.7.mlp, microbatch 3"  # as long as what a rank says


def frame(kind: int, rank: int, progress: int = 0, where: bytes = b"", text: bytes = b"") -> bytes:
    """The bytes of a frame."""
    size = _PREFIX.size - 4 + len(where) + len(text)
    head = _PREFIX.pack(size, len(where), len(text), 0, rank, 0, 0, progress, 0, kind, 0, 0)
    return head + where + text


class Ranks:
    """Holds the connections of all ranks, one each."""

    def __init__(self, port: int, size: int) -> None:
        self.port, self.size = port, size
        self.sockets: list[socket.socket] = []
        self.rests = [b""] * size
        self.epoll = select.epoll()
        self.by_fd: dict[int, int] = {}
        self.received: Counter[int] = Counter()
        self.num_sent = self.bytes_received = 0
        self.has_ended = [False] * size
        self.num_told_of_all = 0  # ranks that know that all have left

    def send(self, rank: int, *content: Any) -> None:
        """Says something as a rank; frames of ranks fit into the buffer of a connection."""
        self.sockets[rank].sendall(frame(content[0], rank, *content[1:]))
        self.num_sent += 1

    def pump(self, timeout_s: float) -> None:
        """Takes what has come."""
        for fd, _ in self.epoll.poll(timeout_s):
            rank = self.by_fd[fd]
            try:
                data = self.sockets[rank].recv(1 << 20)
            except BlockingIOError:
                continue
            if not data:
                self.has_ended[rank] = True
                self.epoll.unregister(fd)
                continue
            self.bytes_received += len(data)
            self._take(rank, self.rests[rank] + data)

    def _take(self, rank: int, data: bytes) -> None:
        at = 0
        while len(data) - at >= _PREFIX.size:
            size = 4 + int.from_bytes(data[at : at + 4], sys.byteorder)
            if len(data) - at < size:
                break
            kind = data[at + _PREFIX.size - 8]
            self.received[kind] += 1
            content = data[at + _PREFIX.size : at + size]
            at += size
            if kind == _FREEZE:
                self.send(rank, _FROZEN, 100 + rank % 2)
            elif kind == _LEFT_RANKS:  # a bit for each
                num_left = int.from_bytes(content, "little").bit_count()
                self.num_told_of_all += num_left == self.size
            elif kind == _REFUSED:
                raise RuntimeError(f"rank {rank} was refused")
        self.rests[rank] = data[at:]

    def wait(self, is_so: Callable[[], bool]) -> None:
        """Waits until a condition holds, however long the machine takes."""
        deadline = time.monotonic() + _LIMIT_S
        while not is_so():
            self.pump(0.1)
            if time.monotonic() > deadline:
                raise RuntimeError(f"it takes more than {_LIMIT_S} s; so far: {self.received}")

    # ---- phases ----------------------------------------------------------------

    def join(self) -> None:
        for rank in range(self.size):
            one = socket.create_connection(("127.0.0.1", self.port), _LIMIT_S)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sockets.append(one)
            self.rests[rank] = self._prove(rank)
            self.send(rank, _HELLO)
            one.setblocking(False)
            self.by_fd[one.fileno()] = rank
            self.epoll.register(one.fileno(), select.EPOLLIN)
            if rank % 64 == 63:
                self.pump(0.0)
        self.wait(lambda: self.received[_WELCOME] == self.size)

    def _prove(self, rank: int) -> bytes:
        """Proves to both sides that the secret is known; returns the bytes after the proof."""
        handshake, received = _C.Handshake.caller(_SECRET, _PURPOSE, rank), b""
        while True:
            used, answer = handshake.advance(received)
            received = received[used:]
            self.sockets[rank].sendall(answer)
            if handshake.is_proven:
                return received
            received += self.sockets[rank].recv(1 << 12)

    def steady(self, seconds: float) -> None:
        begin, slot = time.monotonic(), 0
        slot_s = _STATUS_EVERY_S / _SLOTS
        while slot * slot_s < seconds:
            for rank in range(slot % _SLOTS, self.size, _SLOTS):
                self.send(rank, _STATUS, slot, _WHERE, b"works on a microbatch")
            slot += 1
            while (left_s := begin + slot * slot_s - time.monotonic()) > 0:
                self.pump(left_s)

    def stop(self) -> None:
        self.send(self.size - 1, _STOP_ASKED)
        self.wait(lambda: self.received[_STOP_AT] == self.size)

    def fault(self) -> None:
        self.send(self.size // 2, _RAISED, 0, b"the script", b"RuntimeError: on purpose")
        self.wait(lambda: self.received[_RAISED] == self.size - 1)

    def leave(self) -> None:
        for rank in range(self.size):
            self.send(rank, _LEFT)
            if rank % 16 == 15:
                self.pump(0.0)
        self.wait(lambda: self.num_told_of_all == self.size)


def hub_cpu_s(pid: int) -> float:
    """Seconds that the thread of the hub has computed."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().strip() == "smp-hub":
            return int((task / "schedstat").read_text().split()[0]) / 1e9
    raise RuntimeError(f"process {pid} has no hub")


def be_ranks(port: int, size: int, pid: int, phases: list[str], seconds: float) -> dict[str, Any]:
    """Goes through the phases; what each took."""
    ranks, result = Ranks(port, size), {}
    for phase in phases:
        before = (time.perf_counter(), hub_cpu_s(pid), ranks.num_sent, ranks.received.total())
        ranks.bytes_received = 0
        getattr(ranks, phase)(*([seconds] if phase == "steady" else []))
        took = (time.perf_counter(), hub_cpu_s(pid), ranks.num_sent, ranks.received.total())
        result[phase] = {
            "s": round(took[0] - before[0], 4),
            "hub_cpu_s": round(took[1] - before[1], 4),
            "to_hub": took[2] - before[2],
            "from_hub": took[3] - before[3],
            "mb_from_hub": round(ranks.bytes_received / 1e6, 3),
        }
    return result


def measure(size: int, phases: list[str], seconds: float) -> dict[str, Any]:
    """Measures one hub, whose ranks run in a process of their own."""
    hub = _C.LivenessHub(size, address="127.0.0.1", secret=_SECRET)
    words = ["--as-ranks", str(hub.port), "--pid", str(os.getpid()), "--phases", *phases]
    done = subprocess.run(
        [sys.executable, __file__, "--ranks", str(size), "--seconds", str(seconds), *words],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    hub.close()
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--seconds", type=float, default=5.0, help="of the steady phase")
    phases = ["join", "steady", "stop", "fault", "leave"]
    parser.add_argument("--phases", nargs="+", choices=phases, default=phases)
    parser.add_argument("--as-ranks", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--pid", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    most = max(args.ranks) + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, max(most, hard)))
    if args.as_ranks is not None:
        print(json.dumps(be_ranks(args.as_ranks, most - 256, args.pid, args.phases, args.seconds)))
        return
    import environment

    for size in args.ranks:
        line = {"benchmark": "control_plane", "num_ranks": size}
        line |= measure(size, args.phases, args.seconds) | environment.describe()
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
