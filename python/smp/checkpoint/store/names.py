"""Parses addresses of stores, and names the objects in them. Pure; imports no torch."""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

#: Supported protocols, under fsspec's names.
PROTOCOLS = ("s3", "gs", "file", "memory")
#: Suffix of an object or file that is not complete yet; stores without renames never have one.
SENDING_SUFFIX = ".sending"

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)\Z", re.DOTALL)
_GENERATION = re.compile(r"[0-9a-f]{24}\Z")
_SAFE = "+=@,-_ "


@dataclass(frozen=True)
class Address:
    """The place of checkpoints in a store: ``s3://bucket/prefix``.

    Attributes:
        protocol: one of `PROTOCOLS`.
        path: path without the protocol and without a slash at the end.
    """

    protocol: str
    path: str

    def __str__(self) -> str:
        return f"{self.protocol}://{self.path}"

    def local_name(self) -> str:
        """Returns a readable name for the folder of this address; each address has its own."""
        words = re.sub(r"[^A-Za-z0-9.-]+", "-", self.path).strip("-.")[-40:].lstrip("-.")
        return f"{self.protocol}-{words}-{zlib.crc32(str(self).encode()):08x}"


@dataclass(frozen=True, order=True)
class Key:
    """A generation of a checkpoint. Keys are ordered by the time of the save.

    Attributes:
        generation: 24 hexadecimal digits that begin with the time, see `folder.new_generation`.
        name: name of the folder, ``<tag>_partial``.
    """

    generation: str
    name: str

    @property
    def time_s(self) -> float:
        """Returns the time of the save, in seconds since 1970."""
        return int(self.generation[:16], 16) / 1e9

    def folder(self) -> str:
        """Returns the name of its folder in the store."""
        return f"{quote(self.name, safe=_SAFE)}.{self.generation}"

    @classmethod
    def of_folder(cls, folder: str) -> Key | None:
        """Returns the key with this `folder`; None if the folder is no generation."""
        name, dot, generation = folder.rpartition(".")
        if not dot or not name or not is_ordered(generation):
            return None
        key = cls(generation, unquote(name))
        return key if key.folder() == folder else None


def is_ordered(generation: str) -> bool:
    """Returns whether a generation begins with the time of its save."""
    return _GENERATION.match(generation) is not None


def is_address(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is an address of a store, not a folder."""
    return isinstance(path, str) and _ADDRESS.match(path) is not None


def parse(text: str) -> Address:
    """Parses an address.

    Raises:
        ValueError: the store is unknown, or the place in it is invalid.
    """
    match = _ADDRESS.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not an address of a store; write s3://bucket/prefix")
    protocol, path = match[1].lower(), match[2].rstrip("/")
    if protocol not in PROTOCOLS:
        raise ValueError(
            f"{text!r}: checkpoints can be kept in {', '.join(f'{p}://' for p in PROTOCOLS)}, not "
            f"in {protocol}://; give one of these, or a folder"
        )
    if "::" in text or any(ord(letter) < 32 for letter in text):
        raise ValueError(f"{text!r}: an address has no chains of stores and no control characters")
    parts = path.split("/")
    if protocol == "file" and not path.startswith("/"):
        raise ValueError(f"{text!r}: give the whole path, file:///folder")
    rest = parts[1:] if path.startswith("/") else parts
    if not path or any(part in ("", ".", "..") for part in rest):
        raise ValueError(f"{text!r}: name a place in the store without empty parts, '.' and '..'")
    return Address(protocol, path)


def local_folder(root: Path, address: Address) -> Path:
    """Returns the folder on the machine where an address's checkpoints lie before they are sent."""
    return root / address.local_name()
