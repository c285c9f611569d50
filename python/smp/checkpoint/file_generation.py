"""Writes files that get their names in one step, or not at all. Imports no torch."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from smp.checkpoint import file_system, folder, left_over
from smp.checkpoint.locks import OwnerLock

_CONTENT = "user_content_"


class FileGeneration:
    """A write of the file ``<path>/<name>``, and of ``user_content_<name>`` that belongs to it.

    A crash at any moment leaves both old or both new: the content is complete beside the file when
    the file gets its name, and :func:`content_of` finds it from then on. Nothing here is
    collective.

    Attributes:
        temporary: path at which the file is written.
        content: path at which its content is written, after the file.
        target: final path of the file.
        generation: name of this write, unique among all that write to ``path``.
    """

    def __init__(self, path: Path, name: str, generation: str, lock: OwnerLock) -> None:
        self.temporary = left_over.temporary(path, name, generation)
        self.content = left_over.temporary(path, _CONTENT + name, generation, "following")
        self.target = path / name
        self.generation = generation
        self._lock: OwnerLock | None = lock

    @classmethod
    def begin(cls, path: Path, name: str, generation: str) -> FileGeneration:
        """Makes the temporary file, after deleting or finishing the writes of dead generations.

        Raises:
            ValueError: the name is invalid for a file, or the generation is in use.
        """
        folder.check_name(name)
        path.mkdir(parents=True, exist_ok=True)
        result = cls(path, name, generation, left_over.own(path, generation))
        try:
            result.temporary.touch()  # for hosts that see the file, but not the lock
        except BaseException:
            result.abandon()
            raise
        return result

    def commit(self) -> None:
        """Gives both files, which are synchronised, their names, and marks the file as newest."""
        path = self.target.parent
        obsolete = left_over.followers(path, _CONTENT + self.target.name)
        file_system.sync_folder(path)
        os.replace(self.temporary, self.target)
        file_system.sync_folder(path)
        for follower in obsolete:
            # The follower's generation could not be recognised as dead; its file is replaced.
            file_system.delete(follower)
        left_over.settle(path, self.generation)
        folder.write_newest(path, self.target.name, self.generation)
        self._release()

    def abandon(self) -> None:
        """Deletes the written files, unless they were committed."""
        if self._lock is not None:
            left_over.settle(self.target.parent, self.generation)
            self._release()

    def _release(self) -> None:
        assert self._lock is not None
        self._lock.release(delete=True)
        self._lock = None


def content_of(file: Path) -> Path | None:
    """Returns the content that belongs to a file, or None."""
    name = _CONTENT + file.name
    # A following content may get its name during this search.
    found = [*reversed(left_over.followers(file.parent, name)), file.with_name(name)]
    return next((path for path in found if path.is_file()), None)


def write_alone(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes one file in one step, after deleting files that dead writers of it left.

    Several processes may do so at once; the last one wins. The umask sets the mode.
    """
    generation = left_over.generation_prefix(path.name) + secrets.token_hex(6)
    lock = left_over.own(path.parent, generation, only=path.name)
    try:
        file_system.write_file(path, write, generation)
    finally:
        lock.release(delete=True)
