"""A lock file that tells whether the job that writes a folder still lives. Imports no torch."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path

#: What another host writes counts as dead when nothing of it has changed for so long: not every
#: shared file system shares its locks.
QUIET_SECONDS = 3600.0

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class OwnerLock:
    """Held by the process that writes a folder or file, from before it exists until it has its
    name.

    The lock is one of the kernel (``flock``): it ends with the process, however that ends.
    """

    def __init__(self, path: Path, descriptor: int, is_real: bool) -> None:
        self._path = path
        self._descriptor = descriptor
        self._is_real = is_real

    @classmethod
    def take(cls, path: Path) -> OwnerLock | None:
        """The lock, or None if another holds it."""
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                is_real = _lock(descriptor)
                if _is_same_file(path, descriptor):
                    return cls(path, descriptor, is_real)
            except BlockingIOError:
                os.close(descriptor)
                return None
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # deleted by its last holder in between

    def sign(self) -> None:
        """Leaves this host's name in the file, for :func:`is_dead` on other hosts."""
        os.truncate(self._descriptor, 0)
        os.pwrite(self._descriptor, socket.gethostname().encode(), 0)

    def proves_death(self) -> bool:
        """Whether having this lock means that the process that signed it is dead.

        Not where there are no locks, and not when another host signed.
        """
        host = os.pread(self._descriptor, 256, 0).decode(errors="replace")
        return self._is_real and host in ("", socket.gethostname())

    def release(self, delete: bool) -> None:
        if delete:
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def take_from_the_dead(path: Path, written: list[Path]) -> OwnerLock | None:
    """The lock at ``path`` if the writer of these folders and files is no more, else None."""
    lock = OwnerLock.take(path)
    if lock is None:
        return None
    if not lock.proves_death() and any(_is_busy(item) for item in written):
        lock.release(delete=False)
        return None
    return lock


def _lock(descriptor: int) -> bool:
    """Locks, or raises BlockingIOError; False where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _is_busy(item: Path) -> bool:
    limit = time.time() - QUIET_SECONDS
    try:
        inside = item.iterdir() if item.is_dir() else ()
        return any(p.stat().st_mtime > limit for p in (item, *inside))
    except FileNotFoundError:
        return False
