"""Memory of copies of states, which a rank writes and its keeper maps."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from smp.step.copy_memory import StateIsLost, _File, _is_new, _read, _Words

PARTS = [torch.tensor([1, 2, 3], dtype=torch.uint8), torch.arange(5, dtype=torch.uint8)]


def words_of(file: _File, number: int = 1) -> _Words:
    return _Words(3, 8, number, 0, os.getpid(), file.fd, file.token, file.room.numel(), 0, 0)


def test_a_keeper_sees_what_was_written_and_keeps_it_when_the_file_is_closed() -> None:
    made = _File.make(8)
    found = _File.open(os.getpid(), made.fd, made.token, made.room.numel())
    assert found is not None
    words = words_of(made)
    made.write(1, PARTS)
    fd = made.fd
    del made
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    copy = _read(found, words)
    assert copy.head == bytes([1, 2, 3]) and copy.memory.tolist() == [0, 1, 2, 3, 4]
    assert copy.num_bytes == 8


def test_other_files_and_other_processes_are_not_mapped() -> None:
    made, other = _File.make(8), _File.make(8)
    room = made.room.numel()
    assert _File.open(os.getpid(), made.fd, other.token, room) is None, "another file"
    assert _File.open(os.getpid(), made.fd, made.token, 2 * room) is None, "too short a file"
    assert _File.open(2**22 + 1, made.fd, made.token, room) is None, "no such process"


def test_a_copy_that_was_written_again_is_not_taken() -> None:
    made = _File.make(8)
    made.write(1, PARTS)
    words = words_of(made)
    made.write(3, PARTS)
    with pytest.raises(StateIsLost, match="another copy than that of the last finished step"):
        _read(made, words)


def test_all_ranks_see_that_a_file_is_new_to_a_keeper() -> None:
    own = words_of(_File.make(8))
    assert _is_new(own, own)
    assert not _is_new(own, replace(own, mapped=own.token))
    assert _is_new(replace(own, slot=1), replace(own, mapped=own.token))
