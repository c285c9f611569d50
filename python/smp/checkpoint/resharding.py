"""Rewrites a checkpoint folder with another number of files, without a job."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import torch

from smp.checkpoint import archive
from smp.checkpoint import manifest as manifests
from smp.checkpoint.archive import Deferred
from smp.checkpoint.folder import Generation, new_generation
from smp.checkpoint.manifest import Block, Layout, Manifest, Piece, StoredEntry
from smp.checkpoint.reader import FolderReader
from smp.tensor_parallel.parts import Part

#: File of a kind's entries; other kinds have files of their own names.
FILE_OF_KIND = {"model": "model", "optimizer": "optimizer", "master": "fp16_states"}
# Files that belong to no rank are copied; random states of the old layout's ranks are not.
_CARRIED = ("user_content.pt", "partition.txt", "config.json")


def reshard(source: Path, target: Path, num_parts: int = 1) -> Manifest:
    """Writes ``target``, a folder with the entries of ``source`` in ``num_parts`` equal parts.

    Each kind of entries gets one file per part, ``model_<i>.pt``, ``optimizer_<i>.pt``,
    ``fp16_states_<i>.pt``: a dictionary from names to elements, in the entry's own shape when
    there is one part and flat otherwise. A job of any layout can resume from either folder; random
    states of ranks are left out. Memory: one part of one tensor, and the buffers of the writer.

    Raises:
        FileExistsError: ``target`` exists.
        ValueError: ``num_parts`` is below 1.
    """
    if num_parts < 1:
        raise ValueError(f"{num_parts} parts: give at least 1")
    if target.exists():
        raise FileExistsError(f"{target} exists already; give a new folder")
    generation = Generation.begin(target.parent, target.name, new_generation())
    try:
        with FolderReader(source) as reader:
            manifest = _write(reader, generation, num_parts)
        generation.commit(manifest, name_newest=False)
    except BaseException:
        generation.abandon()
        raise
    return manifest


def _write(reader: FolderReader, generation: Generation, num_parts: int) -> Manifest:
    source = reader.manifest
    pieces = [_carry(reader, generation.folder)]
    for kind in dict.fromkeys(name.partition("/")[0] for name in source.entries):
        for idx in range(num_parts):
            pieces.append(_write_part(reader, generation.folder, kind, idx, num_parts))
    sizes = {axis: 1 for axis in source.layout.sizes}
    pieces.append(Piece(values=source.values))
    return Manifest.assemble(
        generation.generation, source.versions, Layout(source.layout.config, sizes), pieces
    )


def _carry(reader: FolderReader, folder: Path) -> Piece:
    piece = Piece()
    for name in _CARRIED:
        if name in reader.manifest.files:
            shutil.copyfile(reader.folder / name, folder / name)
            piece.files[name] = manifests.record_of(folder / name)
            if piece.files[name] != reader.manifest.files[name]:
                raise RuntimeError(f"{reader.folder / name} is damaged")
    return piece


def _write_part(reader: FolderReader, folder: Path, kind: str, idx: int, num_parts: int) -> Piece:
    parts = {
        name: Part.share(entry.shape, idx, num_parts)
        for name, entry in reader.manifest.entries.items()
        if name.partition("/")[0] == kind
    }
    structure = {}
    for name, part in parts.items():
        entry = reader.manifest.entries[name]
        shape = entry.shape if num_parts == 1 else (part.flat_numel,)
        make = functools.partial(_read, reader, name, part, shape)
        structure[name.partition("/")[2]] = Deferred(shape, getattr(torch, entry.dtype), make)
    file = f"{FILE_OF_KIND.get(kind, kind)}_{idx}.pt"
    written = archive.write(folder / file, structure)
    piece = Piece(files={file: written.record})
    for (name, part), place in zip(parts.items(), written.places, strict=True):
        entry = reader.manifest.entries[name]
        block = Block(file, place.offset, part)
        piece.entries[name] = StoredEntry(entry.dtype, entry.shape, [block])
    return piece


def _read(reader: FolderReader, name: str, part: Part, shape: tuple[int, ...]) -> torch.Tensor:
    return reader.read(name, part).view(shape)
