"""Tensors in files of torch.distributed.checkpoint: mapped where they lie, and written in one pass.

A file has, one behind the other, what ``torch.save`` makes of each tensor: a zip file whose record
``data/0`` is the tensor's memory. PyTorch's own functions copy that memory several times.
"""

from __future__ import annotations

import io
import mmap
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import smp._C as _C
from smp.checkpoint import archive

_FILE = "__0_0.distcp"
_CHUNK_BYTES = 4 << 20
#: Size of a record's header, without the name.
_HEADER_BYTES = 30


class Writer(FileSystemWriter):
    """A writer of one file, which is synchronised at its end."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        with archive.Writing(Path(self.path) / _FILE, archive.DEFAULTS) as writing:
            for item in plan.items:
                begin = writing.writer.position
                data = planner.resolve_data(item)
                if item.type == WriteItemType.BYTE_IO:
                    assert isinstance(data, io.BytesIO)
                    writing.writer.append(data.getvalue())
                else:
                    assert isinstance(data, Tensor)
                    archive.append_tensor(writing.writer, data)
                del data
                size = writing.writer.position - begin
                info = _StorageInfo(_FILE, begin, size)
                results.append(WriteResult(item.index, size, info))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class MappedFolder:
    """A folder whose tensors have the memory of its files.

    Args:
        folder: the folder.
        metadata: metadata of the folder.
    """

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self._folder = folder
        self._metadata = metadata
        self._mapped: dict[str, mmap.mmap] = {}

    def read(self, key: str) -> Any:
        """Returns a value; a tensor is not copied if it lies in one piece.

        Raises:
            ValueError: a file is damaged, or is not what the metadata says.
        """
        about = self._metadata.state_dict_metadata[key]
        if not isinstance(about, TensorStorageMetadata):
            return self._loaded(self._place(key))
        pieces = [(chunk, self._piece(key, chunk.offsets)) for chunk in about.chunks]
        for chunk, piece in pieces:
            if piece.shape != chunk.sizes or piece.dtype != about.properties.dtype:
                raise ValueError(
                    f"expected {about.properties.dtype} {list(chunk.sizes)}, found {piece.dtype} "
                    f"{list(piece.shape)}"
                )
        if len(pieces) == 1 and pieces[0][1].shape == about.size:
            return pieces[0][1]
        whole = torch.empty(about.size, dtype=about.properties.dtype)
        left = whole.numel()
        for chunk, piece in pieces:
            target = whole
            for dim, (begin, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dim, begin, size)
            target.copy_(piece)
            left -= piece.numel()
        if left != 0:
            raise ValueError(f"its pieces lack {left} of {whole.numel()} elements")
        return whole

    def _place(self, key: str, offsets: torch.Size | None = None) -> Any:
        assert self._metadata.storage_data is not None
        try:
            return self._metadata.storage_data[MetadataIndex(key, offsets)]
        except KeyError:
            raise ValueError(f"the metadata has no place of the piece at {offsets}") from None

    def _file(self, name: str) -> mmap.mmap:
        if name not in self._mapped:
            if Path(name).name != name:
                raise ValueError(f"the file {name!r} is not in the folder")
            with open(self._folder / name, "rb") as file:
                # A private mapping: torch needs writable memory, and no other process sees writes.
                self._mapped[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._mapped[name]

    def _bytes(self, place: Any) -> memoryview:
        extensions = getattr(place, "transform_descriptors", None)  # not in torch 2.6
        if extensions:
            raise ValueError(
                f"{place.relative_path} is written with the extensions {', '.join(extensions)}, "
                "which are not read; save without them"
            )
        mapping = self._file(place.relative_path)
        begin, end = place.offset, place.offset + place.length
        if not 0 <= begin <= end <= len(mapping):
            raise ValueError(
                f"{place.relative_path} has {len(mapping)} bytes, and [{begin}, {end}) are expected"
            )
        return memoryview(mapping)[begin:end]

    def _loaded(self, place: Any, device: str = "cpu") -> Any:
        try:
            with io.BufferedReader(_Stored(self._bytes(place))) as file:
                return torch.load(file, map_location=device, weights_only=True, mmap=False)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ValueError(f"{place.relative_path} at {place.offset}: {error}") from None

    def _piece(self, key: str, offsets: torch.Size) -> Tensor:
        place = self._place(key, offsets)
        like, stored = self._loaded(place, "meta"), self._bytes(place)
        num_bytes = like.untyped_storage().nbytes()
        if num_bytes == 0:
            return torch.empty(like.shape, dtype=like.dtype)
        try:
            data = _data_of(_record_in(stored), stored)
        except (zipfile.BadZipFile, RuntimeError) as error:
            raise ValueError(f"{place.relative_path} at {place.offset}: {error}") from None
        if len(data) != num_bytes:
            raise ValueError(f"{place.relative_path} has {len(data)} bytes of {num_bytes}")
        flat = torch.frombuffer(data, dtype=like.dtype)
        return flat.as_strided(like.shape, like.stride(), like.storage_offset())


class _Stored(io.RawIOBase):
    """The bytes of one tensor in a file, as a file."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._view)}
        self._position = base[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        found = self._view[self._position : self._position + len(buffer)]
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)


def _record_in(stored: memoryview) -> zipfile.ZipInfo:
    """Returns the record with the memory of the tensor.

    Raises:
        RuntimeError: there are several, or it is compressed or of another byte order.
    """
    with io.BufferedReader(_Stored(stored)) as file, zipfile.ZipFile(file) as archived:
        records = [i for i in archived.infolist() if i.filename.split("/")[-2:-1] == ["data"]]
        orders = [i for i in archived.infolist() if i.filename.endswith("/byteorder")]
        if any(archived.read(order).decode() != sys.byteorder for order in orders):
            raise RuntimeError("the file is of a machine with another byte order")
    if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED:
        raise RuntimeError(f"expected the memory of one tensor, found {len(records)} records")
    return records[0]


def _data_of(record: zipfile.ZipInfo, stored: memoryview) -> memoryview:
    """Returns the data of a stored record.

    Raises:
        RuntimeError: its checksum is another.
    """
    header = stored[record.header_offset : record.header_offset + _HEADER_BYTES]
    sizes = [int.from_bytes(header[at : at + 2], "little") for at in (26, 28)]
    begin = record.header_offset + _HEADER_BYTES + sum(sizes)
    data = stored[begin : begin + record.file_size]
    crc = 0
    for at in range(0, len(data), _CHUNK_BYTES):
        crc = _C.crc32(bytes(data[at : at + _CHUNK_BYTES]), crc)
    if crc != record.CRC:
        raise RuntimeError(f"bytes are damaged: checksum {crc:08x}, expected {record.CRC:08x}")
    return data
