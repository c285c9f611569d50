"""The process of ``smp run --hosts`` on each host: starts its ranks, and ends with them.

It receives orders on standard input and reports events on standard output (`frames`). When the
standard input closes, the ranks are ended, so that they do not outlive the command or the
connection to it.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

from smp_cli import frames
from smp_cli.environment import Place, rank_environment, without_foreign
from smp_cli.output import Output, Writers
from smp_cli.ranks import Ranks

_POLL_S = 0.2
_READ_BYTES = 1 << 16


class _Relayed(Output):
    """Sends the lines of ranks to the command, which relays them."""

    def __init__(self, to: IO[bytes], first_rank: int) -> None:
        super().__init__()
        object.__setattr__(self, "_to", to)
        object.__setattr__(self, "_first_rank", first_rank)

    def open(self, rank: int, is_first: bool) -> Writers:
        to, number = self.__dict__["_to"], self.__dict__["_first_rank"] + rank

        def relay(stream: str, lines: list[bytes]) -> None:
            texts = [frames.to_text(line) for line in lines]
            frames.send(to, "lines", frames.MARK, rank=number, stream=stream, lines=texts)

        return Writers(lambda lines: relay("out", lines), lambda lines: relay("err", lines))


class _Orders:
    """The orders of the command, read by a thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        # A buffered stream would be locked by this thread when the process ends.
        rest = b""
        while data := os.read(self._fd, _READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if order := frames.read(line):
                    self._queue.put(order)
        self._queue.put(None)

    def wait(self) -> dict[str, Any] | None:
        """Waits for the next order; returns None when there are no more."""
        return self._queue.get()

    def take(self) -> list[dict[str, Any] | None]:
        """Takes the orders that have come."""
        taken = []
        while not self._queue.empty():
            taken.append(self._queue.get())
        return taken


def _run(order: dict[str, Any], orders: _Orders, to: IO[bytes], folder: Path) -> None:
    ranks = Ranks(_Relayed(to, order["first_rank"]), is_first=True)
    # A session's end may send SIGTERM to all processes; this one relays it, since ranks may save.
    signal.signal(signal.SIGTERM, lambda *_: ranks.send(signal.SIGTERM))
    num_told = 0
    try:
        for local_rank in range(order["local_size"]):
            ranks.start(order["command"], _environment(order, local_rank, folder))
        while ranks.running:
            ranks.wait(_POLL_S)
            for one in orders.take():
                if one is None:
                    return
                ranks.send(signal.Signals(one["signal"]))
            for local_rank, status in ranks.ended[num_told:]:
                _tell_end(order["first_rank"], local_rank, status, to, folder)
            num_told = len(ranks.ended)
    finally:
        ranks.kill()
        ranks.close()


def _environment(order: dict[str, Any], local_rank: int, folder: Path) -> dict[str, str]:
    place = Place(
        order["first_rank"] + local_rank, order["world_size"], local_rank, order["local_size"]
    )
    return rank_environment(
        {**without_foreign(os.environ), **order["environment"]},
        place,
        restart_count=order["restart_count"],
        failure_file=str(_failure_file(folder, local_rank)),
        torch_env=order["torch_env"],
    )


def _failure_file(folder: Path, local_rank: int) -> Path:
    return folder / f"failure{local_rank}.json"


def _tell_end(first_rank: int, local_rank: int, status: int, to: IO[bytes], folder: Path) -> None:
    file = _failure_file(folder, local_rank)
    failure = file.read_text() if file.exists() else None
    rank = first_rank + local_rank
    frames.send(to, "ended", frames.MARK, rank=rank, status=status, failure=failure)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def main() -> int:
    """Runs the ranks of this host."""
    to = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may be written between the frames
    frames.send(to, "hello", frames.MARK, host=socket.gethostname(), port=_free_port())
    orders = _Orders(sys.stdin.fileno())
    order = orders.wait()
    if order is None:
        return 1  # the command has ended without an order
    try:
        os.chdir(order["folder"])
    except OSError as error:
        text = f"cannot enter {order['folder']}, where the command was started: {error.strerror}"
        frames.send(to, "refused", frames.MARK, text=text)
        return 1
    with tempfile.TemporaryDirectory(prefix="smp-run-") as folder:
        try:
            _run(order, orders, to, Path(folder))
        except BrokenPipeError:
            return 1  # the command no longer reads; the ranks are ended
        except OSError as error:
            frames.send(to, "refused", frames.MARK, text=f"cannot start a rank: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
