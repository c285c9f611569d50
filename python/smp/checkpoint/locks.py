"""A lock file that shows whether the job that writes a folder still lives. Imports no torch."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path

#: Another host's write counts as dead when no file of it has changed for so long: not every shared
#: file system shares its locks.
QUIET_SECONDS = 3600.0

_POLL_S = 0.01
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class OwnerLock:
    """A lock of the process that writes a folder or file, held until that has its name.

    The kernel keeps the lock (``flock``), so it ends with the process, however that ends.
    """

    def __init__(self, path: Path, descriptor: int, is_real: bool) -> None:
        self._path = path
        self._descriptor = descriptor
        #: False on a file system without locks, where any number of processes hold one
        self.is_real = is_real

    @classmethod
    def take(
        cls, path: Path, patience_s: float = 0.0, *, is_shared: bool = False
    ) -> OwnerLock | None:
        """Takes the lock; returns None if another process holds it for so long.

        Args:
            path: path of the lock file; made if missing.
            patience_s: seconds to wait for another process.
            is_shared: whether several processes may hold it, each of them with this argument.
        """
        deadline = time.monotonic() + patience_s
        kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                is_real = _lock(descriptor, kind)
                if _is_same_file(path, descriptor):
                    return cls(path, descriptor, is_real)
            except BlockingIOError:
                os.close(descriptor)
                if time.monotonic() >= deadline:
                    return None
                time.sleep(_POLL_S)
                continue
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # its last holder has deleted it meanwhile

    def sign(self) -> None:
        """Writes this host's name into the file, for other hosts' :meth:`proves_death`."""
        os.truncate(self._descriptor, 0)
        os.pwrite(self._descriptor, socket.gethostname().encode(), 0)

    def proves_death(self) -> bool:
        """Returns whether holding this lock proves that the process that signed it is dead.

        It does not if the file system has no locks, or if another host signed.
        """
        host = os.pread(self._descriptor, 256, 0).decode(errors="replace")
        return self.is_real and host in ("", socket.gethostname())

    def release(self, delete: bool) -> None:
        if delete:
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def take_from_the_dead(path: Path, written: list[Path]) -> OwnerLock | None:
    """Takes the lock at ``path`` if the writer of these folders and files is dead, else None."""
    lock = OwnerLock.take(path)
    if lock is None:
        return None
    if not lock.proves_death() and any(_is_busy(item) for item in written):
        lock.release(delete=False)
        return None
    return lock


def _lock(descriptor: int, kind: int) -> bool:
    """Locks a file, or raises BlockingIOError; returns False if the file system has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
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
