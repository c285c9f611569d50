"""Reads parts of the entries of a checkpoint folder, whatever the layout that wrote them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

import smp._C as _C
from smp.checkpoint import manifest as manifests
from smp.checkpoint.former_names import with_present_names
from smp.checkpoint.manifest import Block, Manifest, ManifestError, StoredEntry
from smp.tensor_parallel.parts import Part


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a folder, with the names that tensors of its model have now."""
    return with_present_names(manifests.read(folder))


class FolderReader:
    """A reader that opens files on demand and checks the bytes that it reads.

    One thread uses it. Memory: one chunk (4 MiB) per open file.

    Args:
        folder: checkpoint folder.
        manifest: manifest of the folder, if it has been read.
        get: makes sure that a file exists, and returns its path; None: all files exist.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest | None = None,
        get: Callable[[str], Path] | None = None,
    ) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder) if manifest is None else manifest
        self._get = get or folder.joinpath
        self._files: dict[str, _C.FileReader] = {}

    def __enter__(self) -> FolderReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
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
            into: contiguous CPU tensor of the entry's dtype with as many elements; None: a new
                one, of the entry's shape for a whole entry and flat otherwise.

        Raises:
            ManifestError: no file has some elements of the part.
            RuntimeError: bytes are damaged; the text names file and offset.
        """
        entry = self.entry(name)
        wanted = Part.whole(entry.shape) if part is None else part
        dtype = getattr(torch, entry.dtype)
        if into is None:
            shape = entry.shape if part is None else (wanted.flat_numel,)
            into = torch.empty(shape, dtype=dtype)
        if into.dtype != dtype or into.numel() != wanted.flat_numel:
            raise ValueError(
                f"{name}: {wanted.flat_numel} elements of {dtype} cannot be read into "
                f"{into.numel()} of {into.dtype}"
            )
        for read, block in plan(name, entry, wanted):
            self._file(block.file).read_slice(read, block.offset, into)
        return into

    def _file(self, name: str) -> _C.FileReader:
        if name not in self._files:
            record = self.manifest.files[name]
            self._files[name] = _C.FileReader(
                str(self._get(name)), record.num_bytes, record.chunk_bytes, record.crc32
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
