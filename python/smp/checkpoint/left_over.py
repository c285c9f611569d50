"""Temporary names, their owners, and the removal of dead owners' files. Imports no torch.

While a name in a folder is written, these lie beside it:

* ``.<name>.writing-<generation>``: the future ``<name>``; after an exchange the former one;
* ``.<name>.following-<generation>``: a complete file that becomes ``<name>`` when all that its
  generation was writing has got its name;
* ``.<name>.old-<generation>``: the former ``<name>``, if the file system cannot exchange names;
* ``.<name>.deleted-<generation>``: a checkpoint that is being deleted;
* ``.generation-<generation>.lock``: locked by the writing process as long as it lives.

The next save settles the generations whose lock no process holds.
"""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path
from typing import NamedTuple

from smp.checkpoint import file_system
from smp.checkpoint.locks import OwnerLock, take_from_the_dead

_LEFT_OVER = re.compile(r"\.(.+)\.(writing|following|old|deleted)-([\w-]+)\Z")
_LOCK = re.compile(r"\.generation-([\w-]+)\.lock\Z")
_GENERATION = re.compile(r"[\w-]+\Z")
#: A process that looks for dead ones holds each lock for a moment, also one just made.
_LOOKED_AT_SECONDS = 0.5


class _Entry(NamedTuple):
    path: Path
    name: str
    kind: str
    generation: str


def temporary(path: Path, name: str, generation: str, kind: str = "writing") -> Path:
    """Returns the temporary name of ``path/<name>``."""
    return path / f".{name}.{kind}-{generation}"


def lock_path(path: Path, generation: str) -> Path:
    """Returns the path of the lock of a generation that writes into ``path``."""
    return path / f".generation-{generation}.lock"


def generation_prefix(name: str) -> str:
    """Returns the prefix of generations that write ``name`` alone, for its next writer."""
    return f"{zlib.crc32(os.fsencode(name)):08x}-"


def own(path: Path, generation: str, only: str | None = None) -> OwnerLock:
    """Takes the lock of a new generation, after settling dead ones.

    Args:
        path: folder that the generation writes into.
        generation: name of the generation.
        only: name whose dead generations are settled, see :func:`recover`.

    Raises:
        ValueError: the generation is no word, or is in use.
    """
    if not _GENERATION.match(generation):
        raise ValueError(f"generation {generation!r} must consist of letters, digits, _ and -")
    recover(path, only)
    lock = OwnerLock.take(lock_path(path, generation), _LOOKED_AT_SECONDS)
    if lock is None:
        raise ValueError(
            f"generation {generation} of {path} is being written by another process; each save "
            "needs its own number"
        )
    lock.sign()
    return lock


def recover(path: Path, only: str | None = None) -> None:
    """Settles the generations in ``path`` whose writers are dead.

    Args:
        path: the folder.
        only: written name whose generations are settled; None: all generations.
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
    """Gives complete files their names, and deletes the rest. The caller has the lock.

    Lists the folder again: the writer may have gone on until the caller got the lock.
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
        # Before the others are deleted, because followers count as complete without them.
        file_system.sync_folder(path)
    for entry in entries:
        target = path / entry.name
        if entry.kind == "old" and not target.exists():
            entry.path.rename(target)
        elif entry.kind != "following":
            file_system.delete(entry.path)


def followers(path: Path, name: str) -> list[Path]:
    """Returns complete files that wait for the name ``path/<name>``, oldest first."""
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
    """Returns the temporary ones among some names."""
    matches = [(name, _LEFT_OVER.match(name)) for name in names]
    return [_Entry(path / name, m[1], m[2], m[3]) for name, m in matches if m is not None]
