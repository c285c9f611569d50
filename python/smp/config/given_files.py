"""Readers of files and JSON from users: regular files only, and a bounded depth.

Reading a FIFO could wait forever, and a device may have no end. Deep nesting overflows the
interpreter's stack, here or in code that walks through the values later.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from itertools import islice
from typing import Any, BinaryIO

#: bytes of a file, at most; files that may be larger have readers of their own
MOST_BYTES = 64 << 20
#: levels of nested containers, at most
MOST_LEVELS = 100
# Containers on one level, at most: a few aliases of YAML may expand to billions.
_MOST_CONTAINERS = 1 << 20

_Path = str | os.PathLike[str]

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: _Path) -> BinaryIO:
    """Opens a file for reading, or the file that a link leads to.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    # A FIFO may never have a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_mode(path, os.fstat(descriptor).st_mode)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: _Path) -> None:
    """Checks a file that another library opens by its path.

    Raises:
        OSError: it does not exist, or is no regular file.
    """
    _check_mode(path, os.stat(path).st_mode)


def _check_mode(path: _Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kind = next((words for test, words in _KINDS if test(mode)), "something else")
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(number, f"expected a regular file, it is {kind}", os.fspath(path))


def read_bytes(path: _Path, most_bytes: int | None = MOST_BYTES) -> bytes:
    """Reads a regular file.

    Args:
        path: path of the file, or of a link to it.
        most_bytes: largest number of bytes of the content; None for any number.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.
    """
    with open_regular(path) as file:
        content = file.read(-1 if most_bytes is None else most_bytes + 1)
    if most_bytes is not None and len(content) > most_bytes:
        raise OSError(
            errno.EFBIG, f"expected at most {most_bytes} bytes, it has more", os.fspath(path)
        )
    return content


def read_text(path: _Path) -> str:
    """Reads a regular file of text in UTF-8.

    Raises:
        OSError: the same as for `read_bytes`.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_bytes(path).decode().replace("\r\n", "\n")


def parse_json(text: str | bytes) -> Any:
    """Parses JSON of a bounded depth.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    check_depth(value)
    return value


def check_depth(value: Any, is_shared: bool = False) -> None:
    """Checks how deeply lists and dictionaries are nested.

    Args:
        value: value from a decoder.
        is_shared: one container may be in several places, as with aliases in YAML.

    Raises:
        ValueError: they are nested too deeply, or aliases expand to too many containers.
    """
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        inner = (
            child
            for container in level
            if isinstance(container, dict | list)
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, dict | list)
        )
        level = list(islice(inner, _MOST_CONTAINERS + 1)) if is_shared else list(inner)
        if not level:
            return
        if is_shared and len(level) > _MOST_CONTAINERS:
            raise ValueError(f"aliases stand for more than {_MOST_CONTAINERS} lists and objects")
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"lists and objects are nested in more than {MOST_LEVELS} levels")


def load_yaml(text: str, yaml: Any) -> Any:
    """Parses YAML of a bounded depth.

    Args:
        text: content of a file.
        yaml: module of PyYAML.

    Raises:
        ValueError: it is nested too deeply.
        yaml.YAMLError: it is not YAML.
    """
    try:
        value = yaml.safe_load(text)
    except RecursionError:
        raise _too_deep() from None
    check_depth(value, is_shared=True)
    return value
