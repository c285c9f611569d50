"""Reports of the system on other processes that have ended."""

from __future__ import annotations

import os
import signal

import pytest

from smp.world import processes
from smp.world.processes import has_ended, process_space


def child() -> int:
    """Starts a process that waits for a signal; returns its number."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    return pid


def test_a_process_has_ended_before_and_after_its_parent_asks() -> None:
    space, pid = process_space(), child()
    assert space and not has_ended(pid, space) and not has_ended(os.getpid(), space)
    os.kill(pid, signal.SIGSTOP)
    assert not has_ended(pid, space), "it may go on"
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(pid, space), "its parent has not asked for its status"
    os.waitpid(pid, 0)
    assert has_ended(pid, space)


def test_nothing_is_known_of_processes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pid = child()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not has_ended(pid, "another machine") and not has_ended(pid, "")
    monkeypatch.setattr(processes.os, "readlink", lambda path: "1")  # of another space
    assert process_space() == ""
