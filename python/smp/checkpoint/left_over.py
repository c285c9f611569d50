"""Temporary names, their owners, and what becomes of those of the dead. Imports no torch.

Beside what is saved in a folder lie, while something is written:

* ``.<name>.writing-<generation>``: what becomes ``<name>``; after an exchange what it was before;
* ``.<name>.following-<generation>``: a complete file that becomes ``<name>`` when all that its
  generation was writing has got its name;
* ``.<name>.old-<generation>``: what ``<name>`` was, where the file system cannot exchange names;
* ``.<name>.deleted-<generation>``: a checkpoint that is being deleted;
* ``.generation-<generation>.lock``: locked by the process that writes as long as it lives.

The next save settles the generations whose lock no process holds.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from pathlib import Path
from typing import NamedTuple

from smp.checkpoint import file_system
from smp.checkpoint.locks import OwnerLock, take_from_the_dead

_LEFT_OVER = re.compile(r"\.(.+)\.(writing|following|old|deleted)-([\w-]+)\Z")
_LOCK = re.compile(r"\.generation-([\w-]+)\.lock\Z")
_GENERATION = re.compile(r"[\w-]+\Z")
#: A process that looks for the dead holds each lock for a moment, also one that has just been made.
_LOOKED_AT_SECONDS = 0.5


class _Entry(NamedTuple):
    path: Path
    name: str
    kind: str
    generation: str


def temporary(path: Path, name: str, generation: str, kind: str = "writing") -> Path:
    """The temporary name of ``path/<name>``."""
    return path / f".{name}.{kind}-{generation}"


def lock_path(path: Path, generation: str) -> Path:
    """The lock of a generation that writes into ``path``."""
    return path / f".generation-{generation}.lock"


def generation_prefix(name: str) -> str:
    """How generations begin that write ``name`` alone, so that its next writer knows them."""
    return f"{zlib.crc32(os.fsencode(name)):08x}-"


def own(path: Path, generation: str, only: str | None = None) -> OwnerLock:
    """Takes the lock of a new generation, after settling dead ones.

    Args:
        only: settle those of this name, see :func:`recover`.

    Raises:
        ValueError: if the generation is no word, or is in use.
    """
    if not _GENERATION.match(generation):
        raise ValueError(f"generation {generation!r} must be of letters, digits, _ and -")
    recover(path, only)
    deadline = time.monotonic() + _LOOKED_AT_SECONDS
    while (lock := OwnerLock.take(lock_path(path, generation))) is None:
        if time.monotonic() > deadline:
            raise ValueError(
                f"generation {generation} of {path} is being written by another process; each "
                "save needs a number of its own"
            )
        time.sleep(0.01)
    lock.sign()
    return lock


def recover(path: Path, only: str | None = None) -> None:
    """Settles the generations in ``path`` whose writers are dead.

    Args:
        only: those that wrote this name; None: all.
    """
    names = os.listdir(path)
    entries = _among(path, names)
    generations = {entry.generation for entry in entries if only in (None, entry.name)}
    for name in names:
        if (match := _LOCK.match(name)) and (
            only is None or match[1].startswith(generation_prefix(only))
        ):
            generations.add(match[1])
    for generation in sorted(generations):
        in_work = [
            entry.path
            for entry in entries
            if entry.generation == generation and entry.kind in ("writing", "following")
        ]
        lock = take_from_the_dead(lock_path(path, generation), in_work)
        if lock is not None:
            settle(path, generation)
            lock.release(delete=True)


def settle(path: Path, generation: str) -> None:
    """Gives what is complete its name, and deletes the rest. The caller has the lock.

    Looks at the folder again: the writer may have gone on until the caller got the lock.
    """
    entries = [entry for entry in _among(path, os.listdir(path)) if entry.generation == generation]
    is_complete = _is_complete(entries, generation)
    followers = [entry for entry in entries if entry.kind == "following"]
    for entry in followers:
        if is_complete:
            entry.path.replace(path / entry.name)
        else:
            file_system.delete(entry.path)
    if followers:
        # Before the others go, without which followers would count as complete.
        file_system.sync_folder(path)
    for entry in entries:
        target = path / entry.name
        if entry.kind == "old" and not target.exists():
            entry.path.rename(target)
        elif entry.kind != "following":
            file_system.delete(entry.path)


def followers(path: Path, name: str) -> list[Path]:
    """Files that are ``path/<name>`` already but for their names, oldest first."""
    entries = _among(path, os.listdir(path))
    found = []
    for entry in entries:
        is_one = entry.kind == "following" and entry.name == name
        if is_one and _is_complete(entries, entry.generation):
            try:
                found.append((entry.path.stat().st_mtime_ns, entry.path))
            except FileNotFoundError:
                continue  # it has just got its name
    return [follower for _, follower in sorted(found)]


def _is_complete(entries: list[_Entry], generation: str) -> bool:
    return not any(e.generation == generation and e.kind == "writing" for e in entries)


def _among(path: Path, names: list[str]) -> list[_Entry]:
    """The temporary ones."""
    matches = [(name, _LEFT_OVER.match(name)) for name in names]
    return [_Entry(path / name, m[1], m[2], m[3]) for name, m in matches if m is not None]
