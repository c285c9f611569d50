"""Inspects checkpoint folders: their content, their damage, and differences between two.

No function here needs a device, or memory for more than a few chunks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint import manifest as manifests
from smp.checkpoint import reader
from smp.checkpoint.manifest import FileRecord, Manifest, ManifestError, StoredEntry
from smp.checkpoint.reader import FolderReader
from smp.tensor_parallel.parts import Part

_PIECE_ELEMENTS = 4 << 20


@dataclass(frozen=True)
class KindTotal:
    """Totals of the entries of one kind, which is the first word of their names."""

    kind: str
    num_entries: int
    num_elements: int
    num_bytes: int


def totals(manifest: Manifest) -> list[KindTotal]:
    """Sums entries by kind, in the order of the manifest."""
    kinds: dict[str, list[StoredEntry]] = {}
    for name, entry in manifest.entries.items():
        kinds.setdefault(name.partition("/")[0], []).append(entry)
    return [
        KindTotal(
            kind,
            len(entries),
            sum(math.prod(e.shape) for e in entries),
            sum(math.prod(e.shape) * e.item_bytes for e in entries),
        )
        for kind, entries in kinds.items()
    ]


def problems(folder: Path) -> Iterator[str]:
    """Yields the problems of a folder; none if each byte is as it was written.

    Reads all files once. Each text names the file or the entry.
    """
    try:
        manifest = manifests.read(folder)
    except (ManifestError, FileNotFoundError) as error:
        yield str(error)
        return
    for name, record in manifest.files.items():
        yield from _problems_of_file(folder / name, record)
    for path in sorted(folder.iterdir()):
        if path.name not in manifest.files and path.name != manifests.FILE_NAME:
            yield f"{path.name}: not in the manifest"
    yield from problems_of_entries(manifest)


def problems_of_entries(manifest: Manifest) -> Iterator[str]:
    """Yields a text for each entry with elements that no file has."""
    for name, entry in manifest.entries.items():
        try:
            reader.plan(name, entry, Part.whole(entry.shape))
        except ManifestError as error:
            yield str(error)


def _problems_of_file(path: Path, record: FileRecord) -> Iterator[str]:
    if not path.is_file():
        yield f"{path.name}: missing"
        return
    size = path.stat().st_size
    if size != record.num_bytes:
        yield f"{path.name}: {size} bytes, {record.num_bytes} in the manifest"
        return
    with open(path, "rb") as file:
        for idx, crc in enumerate(record.crc32):
            try:
                chunk = file.read(record.chunk_bytes)
            except OSError as error:
                yield f"{path.name}: cannot be read at {idx * record.chunk_bytes}: {error}"
                return
            if zlib.crc32(chunk) != crc:
                begin = idx * record.chunk_bytes
                yield f"{path.name}: bytes [{begin}, {begin + len(chunk)}) are damaged"


@dataclass(frozen=True)
class Difference:
    """A difference between two checkpoints."""

    name: str
    text: str


def differences(first: FolderReader, second: FolderReader) -> Iterator[Difference]:
    """Yields the entries and values in which two checkpoints differ, whatever their layouts.

    Compares values bit by bit, except that not-a-number equals itself.
    """
    entries = first.manifest.entries, second.manifest.entries
    for name in [*entries[0], *(n for n in entries[1] if n not in entries[0])]:
        a, b = entries[0].get(name), entries[1].get(name)
        if a is None or b is None:
            yield Difference(name, f"only in the {'second' if a is None else 'first'}")
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            yield Difference(name, f"{a.dtype} {list(a.shape)} became {b.dtype} {list(b.shape)}")
        else:
            text = _values_differ(first, second, name, a)
            if text:
                yield Difference(name, text)
    yield from _json_differs("values", first.manifest.values, second.manifest.values)


def _values_differ(first: FolderReader, second: FolderReader, name: str, entry: StoredEntry) -> str:
    numel = math.prod(entry.shape)
    num_different = 0
    largest = 0.0
    for begin in range(0, numel, _PIECE_ELEMENTS):
        part = Part.flat(entry.shape, begin, min(_PIECE_ELEMENTS, numel - begin))
        a, b = first.read(name, part), second.read(name, part)
        if torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            continue
        a, b = _wide(a), _wide(b)
        different = (a != b) & ~((a != a) & (b != b))
        num_different += int(different.sum())
        if bool(different.any()):
            difference = float((a - b).abs()[different].max())
            if not difference <= largest:  # not-a-number is the largest
                largest = difference
    if not num_different:
        return ""
    return f"{num_different} of {numel} elements differ, by up to {largest:.3g}"


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _json_differs(key: str, a: Any, b: Any) -> Iterator[Difference]:
    if isinstance(a, dict) and isinstance(b, dict):
        for name in [*a, *(n for n in b if n not in a)]:
            if name not in a or name not in b:
                where = "first" if name in a else "second"
                yield Difference(f"{key}.{name}", f"only in the {where}")
            else:
                yield from _json_differs(f"{key}.{name}", a[name], b[name])
    elif a != b:
        yield Difference(key, f"{a!r} became {b!r}")
