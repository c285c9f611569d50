"""Connects ranks by blocking calls, and ends the wait for them when a rank fails.

Constructors of Gloo and of `torch.distributed` wait for each rank until their time-out, and
notice neither a failure nor Ctrl-C. Without this file a rank that has ended would keep the others
waiting until `SMP_TIMEOUT_S`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

import smp._C as _C
from smp.world import thread_device

_T = TypeVar("_T")
_LOOK_S = 0.1
# Connections of a dead rank break before the report of its death arrives.
_NEWS_S = 3.0
# Seconds to wait for a call that ends by itself after a failure.
_END_S = 1.0

_left_behind: list[threading.Thread] = []


def until_a_rank_fails(
    board: _C.FaultBoard | None,
    device: torch.device,
    connect: Callable[[], _T],
    end: Callable[[], None] | None = None,
) -> _T:
    """Runs ``connect`` in its own thread and returns its result. Collective if ``connect`` is.

    Args:
        board: reports of failed ranks; None in a world of one.
        device: device of this rank, current in the thread.
        connect: function that waits for other ranks.
        end: function that ends `connect` in its thread; called if that fails, or a rank has failed.

    Raises:
        PeerFailure: a rank has failed meanwhile. A thread that does not end is left behind.
    """
    if board is None:
        return connect()
    made: list[_T] = []
    errors: list[BaseException] = []
    is_ended = False

    def run() -> None:
        try:
            thread_device.enter(device)
            made.append(connect())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="smp-connecting", daemon=True)
    thread.start()
    try:
        while thread.is_alive() and board.fault_text() is None:
            thread.join(_LOOK_S)
        if end is not None and not made:
            is_ended = True
            end()
        thread.join(_END_S)
    finally:
        if thread.is_alive():
            _left_behind.append(thread)
    if made and not is_ended:
        return made[0]
    error = errors[0] if errors else None
    if error is not None and "onnect" in str(error):
        _await_news(board)
    try:
        board.raise_if_faulted()
    except _C.PeerFailure as failure:
        raise failure from error
    assert error is not None
    raise error


def _await_news(board: _C.FaultBoard) -> None:
    deadline = time.monotonic() + _NEWS_S
    while board.fault_text() is None and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def exit_if_left_behind(status: int) -> None:
    """Ends the process at once if a thread still connects. Called last at exit.

    Otherwise the thread would return to an interpreter that has been finalized.
    """
    if any(thread.is_alive() for thread in _left_behind):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
