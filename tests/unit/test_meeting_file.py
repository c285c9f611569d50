"""The file in which the ranks of a job meet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from smp.world.launch import read_launch
from smp.world.rendezvous import MeetingPoint


def open_at(path: Path) -> MeetingPoint:
    env = {"SMP_RANK": "0", "SMP_WORLD_SIZE": "2", "SMP_RENDEZVOUS": f"file://{path}"}
    point = MeetingPoint()
    point.open(read_launch(env, "host"), env, 5.0).set("key", "value")
    return point


def test_others_cannot_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        point = open_at(tmp_path / "meeting")
    finally:
        os.umask(before)
        os.environ.pop("SMP_RANK_PROCESS", None)
    assert (tmp_path / "meeting").stat().st_mode & 0o777 == 0o600
    point.end()


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "meeting").mkdir()
    with pytest.raises(RuntimeError, match="meeting, which cannot be opened: Is a directory"):
        open_at(tmp_path / "meeting")
