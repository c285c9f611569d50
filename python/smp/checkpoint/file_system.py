"""Renames and writes files so that they survive a crash. Imports no torch."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h
_SEE_SECONDS = 5.0
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def sync_folder(folder: Path) -> None:
    """Makes the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems have no fsync of folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_file(path: Path, write: bytes | Callable[[BinaryIO], object], unique: str) -> None:
    """Writes ``path`` so that a crash leaves the previous file whole, or the new one.

    Args:
        path: the file.
        write: the content, or a function that writes it.
        unique: name of this writer, for the temporary name.
    """
    temporary = path.with_name(f".{path.name}.writing-{unique}")
    try:
        with open(temporary, "wb") as file:
            if isinstance(write, bytes):
                file.write(write)
            else:
                write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def wait_until_seen(folder: Path, reason: str) -> None:
    """Waits for a folder of another host: network file systems show a new one late.

    Raises:
        FileNotFoundError: this host does not see it within seconds; the text is the reason.
    """
    deadline = time.monotonic() + _SEE_SECONDS
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise FileNotFoundError(reason)
        time.sleep(0.05)


def exchange(first: Path, second: Path) -> bool:
    """Exchanges two names in one step; returns False if the file system cannot.

    Source: renameat2(2), RENAME_EXCHANGE.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    names = os.fsencode(first), os.fsencode(second)
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def delete(path: Path) -> None:
    """Deletes a file or folder that may be gone, or that another process deletes meanwhile."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            shutil.rmtree(path)  # raises the reason
    else:
        path.unlink(missing_ok=True)
