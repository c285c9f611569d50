"""Cables that are late and lose packets: what `tc netem` does, for kernels without it.

The interface of a host is a TAP device here, and so is its port at the bridge; a thread of the test
carries frames between the two. Slower than a cable of the kernel (some 10 MB/s).
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import selectors
import struct
import threading
import time
from dataclasses import dataclass

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_LONGEST_FRAME = 65536


@dataclass
class Quality:
    """Quality of one direction of a cable."""

    latency_s: float = 0.0
    loss: float = 0.0
    """Probability that a frame is lost."""


class Wire:
    """The cables of all hosts of a network."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._stop, self._stopper = os.pipe()
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._queue: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()
        self._random = random.Random(1)
        self._taps: list[int] = []
        self._thread = threading.Thread(target=self._carry, name="wire", daemon=True)
        self.num_lost = 0

    def add(self, host_pid: int, middle_pid: int, port: str) -> Quality:
        """A new cable from `eth0` of a host to a port of the bridge; before `start`.

        Args:
            host_pid: a process in the namespaces of the host.
            middle_pid: a process in those of the bridge.
            port: name of the interface there.

        Returns:
            the quality of what the host sends, to be changed at any time.
        """
        quality = Quality()
        here, there = _make_tap(host_pid, "eth0"), _make_tap(middle_pid, port)
        self._taps += [here, there]
        self._selector.register(here, selectors.EVENT_READ, (there, quality))
        self._selector.register(there, selectors.EVENT_READ, (here, Quality()))
        return quality

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; the interfaces vanish."""
        os.write(self._stopper, b"x")
        if self._thread.ident is not None:
            self._thread.join()
        self._selector.close()
        for fd in (*self._taps, self._stop, self._stopper):
            os.close(fd)

    def _carry(self) -> None:
        while True:
            wait_s = max(0.0, self._queue[0][0] - time.monotonic()) if self._queue else None
            for key, _ in self._selector.select(wait_s):
                if key.data is None:
                    return
                assert isinstance(key.fd, int)
                self._take(key.fd, *key.data)
            while self._queue and self._queue[0][0] <= time.monotonic():
                _, _, fd, frame = heapq.heappop(self._queue)
                _put(fd, frame)

    def _take(self, fd: int, to: int, quality: Quality) -> None:
        try:
            frame = os.read(fd, _LONGEST_FRAME)
        except OSError:
            return  # the interface is down
        if self._random.random() < quality.loss:
            self.num_lost += 1
        elif quality.latency_s:
            due_s = time.monotonic() + quality.latency_s
            heapq.heappush(self._queue, (due_s, next(self._numbers), to, frame))
        else:
            _put(to, frame)


def _put(fd: int, frame: bytes) -> None:
    try:
        os.write(fd, frame)
    except OSError:
        pass  # the interface is down, and the frame is lost


def _make_tap(pid: int, name: str) -> int:
    """A TAP device in the network namespace of a process; it lives as long as the descriptor."""
    made: list[int | OSError] = []

    def make() -> None:  # the thread changes its namespace, and ends there
        try:
            with open(f"/proc/{pid}/ns/net", "rb") as space:
                if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(
                fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI)
            )
            made.append(fd)
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]
