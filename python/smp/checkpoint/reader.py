"""Reads parts of the entries of a checkpoint folder, whatever the layout that wrote them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import smp._C as _C
from smp.checkpoint import manifest as manifests
from smp.checkpoint.former_names import with_present_names
from smp.checkpoint.manifest import Block, ManifestError, StoredEntry
from smp.tensor_parallel.parts import Part


class FolderReader:
    """A reader that opens files on demand and checks the bytes that it reads.

    One thread uses it. Memory: one chunk (4 MiB) per open file.

    Args:
        folder: checkpoint folder.
        get: makes sure that a file exists, and returns its path; None: all files exist.

    Attributes:
        manifest: manifest of the folder, with the names that tensors of its model have now.
    """

    def __init__(self, folder: Path, get: Callable[[str], Path] | None = None) -> None:
        self.folder = folder
        self.manifest = with_present_names(manifests.read(folder))
        self.get = get or folder.joinpath
        self._files: dict[str, _C.FileReader] = {}

    def __enter__(self) -> FolderReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    def entry(self, name: str) -> StoredEntry:
        try:
            return self.manifest.entries[name]
        except KeyError:
            raise KeyError(f"{self.folder} has no entry {name}") from None

    def read(
        self, name: str, part: Part | None = None, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Reads elements of an entry.

        Args:
            name: name of the entry.
            part: part to read; None: all of it.
            into: tensor with as many elements, of any dtype and device; None: a new one on the CPU,
                of the entry's shape for a whole entry and flat otherwise.

        Raises:
            ManifestError: no file has some elements of the part.
            RuntimeError: bytes are damaged; the text names file and offset.
        """
        entry = self.entry(name)
        dtype = getattr(torch, entry.dtype)
        wanted = Part.whole(entry.shape) if part is None else part
        if into is None:
            into = torch.empty(entry.shape if part is None else wanted.flat_numel, dtype=dtype)
        if into.numel() != wanted.flat_numel:
            raise ValueError(
                f"{name}: {wanted.flat_numel} elements cannot be read into {into.numel()}"
            )
        if into.numel() == 0:
            return into
        if into.device.type != "cpu" or into.dtype != dtype or not into.is_contiguous():
            return into.copy_(self.read(name, part).view(into.shape))
        for read, block in plan(name, entry, wanted):
            self._file(block.file).read_slice(read, block.offset, into)
        return into

    def _file(self, name: str) -> _C.FileReader:
        if name not in self._files:
            record = self.manifest.files[name]
            self._files[name] = _C.FileReader(
                str(self.get(name)), record.num_bytes, record.chunk_bytes, record.crc32
            )
        return self._files[name]


def plan(name: str, entry: StoredEntry, wanted: Part) -> list[tuple[_C.SliceRead, Block]]:
    """Returns the reads, and their blocks, that make up a part of an entry.

    Raises:
        ManifestError: no file has some elements.
    """
    try:
        reads = _C.plan_part_reads(
            entry.shape, [_part(block.part) for block in entry.blocks], _part(wanted)
        )
    except ValueError as error:
        raise ManifestError(f"entry {name}: {error}") from None
    return [(read, entry.blocks[read.source_idx]) for read in reads]


def _part(part: Part) -> _C.Part:
    interval = _C.ShardInterval(part.dim, part.begin, part.end, part.extent)
    return _C.Part(interval, part.flat_begin, part.flat_numel, part.view or ())
