"""The process of ``smp run --hosts`` on each host: starts its ranks, and ends with them.

On standard input it receives the ranks, and then numbers of signals and of processes to start, each
as a line; on standard output it reports a free port, lines and ends of ranks, what they note for
the command, and refusals (`frames`). When the standard
input closes, the ranks are ended, so that they do not outlive the command or the connection to it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

from smp_cli import frames
from smp_cli.environment import (
    Share,
    failure_file,
    free_port,
    given_up_file,
    read_notes,
    stoppable_file,
    taken_file,
    without_foreign,
)
from smp_cli.ranks import LocalRanks

_POLL_S = 0.2


def _write(to: IO[bytes], rank: int, stream: str, lines: list[bytes]) -> None:
    frames.send(to, rank=rank, stream=stream, lines=[line.decode("latin-1") for line in lines])


def _hang_up() -> None:
    raise BrokenPipeError


def _run(
    ranks: LocalRanks, restart_count: int, stays: bool, orders: IO[bytes], to: IO[bytes]
) -> None:
    def obey(lines: list[bytes]) -> None:
        for line in lines:
            match json.loads(line):
                case {"start": int(number)}:
                    ranks.start_rank(number, restart_count)
                case {"stop": int(number)}:
                    ranks.stop(number)
                case number:
                    ranks.send(signal.Signals(number))

    # A session's end may send SIGTERM to all processes; this one relays it, since ranks may save.
    signal.signal(signal.SIGTERM, lambda *_: ranks.send(signal.SIGTERM))
    num_reported, told = 0, dict[str, list[int]]()
    try:
        ranks.start(restart_count)
        ranks.relay(orders, obey, _hang_up)
        while ranks.running or stays:
            ranks.wait(_POLL_S)
            for path_of in (given_up_file, taken_file, stoppable_file):
                path = path_of(ranks.meeting)
                numbers = read_notes(path)
                if numbers is not None and numbers != told.get(path.name):
                    new = sorted(set(numbers) - set(told.get(path.name, ())))
                    told[path.name] = numbers
                    frames.send(to, notes={path.name: new})
            for rank, status in ranks.ended[num_reported:]:
                file = failure_file(ranks.meeting, rank)
                failure = file.read_text() if file.exists() else None
                frames.send(to, rank=rank, status=status, failure=failure)
            num_reported = len(ranks.ended)
    finally:
        ranks.end()


def main() -> int:
    """Runs the ranks of this host."""
    to = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may be written between the messages
    frames.send(to, port=free_port())
    orders = os.fdopen(0, "rb", buffering=0)
    order = orders.readline()
    if not order:
        return 1  # the command has ended without an order
    content = json.loads(order)
    share = Share(**content["share"])
    share = replace(share, environment={**without_foreign(os.environ), **share.environment})
    try:
        os.chdir(share.folder)
    except OSError as error:
        text = f"cannot enter {share.folder}, where the command was started: {error.strerror}"
        frames.send(to, refusal=text)
        return 1
    with tempfile.TemporaryDirectory(prefix="smp-run-") as folder:
        ranks = LocalRanks(share, partial(_write, to), Path(folder))
        try:
            _run(ranks, content["restart_count"], content["stays"], orders, to)
        except BrokenPipeError:
            return 1  # the connection has ended, and the ranks with it
        except OSError as error:
            frames.send(to, refusal=f"cannot start a rank: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
