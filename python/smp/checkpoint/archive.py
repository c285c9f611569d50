"""Writes ``.pt`` files in one stream: the structure first, then storage after storage.

``torch.load(path, weights_only=True, mmap=True)`` reads them. The format is that of
``torch.save``: a zip file of stored records, ``data.pkl`` (protocol 2, storages as persistent
ids) and ``data/<n>``. Unlike ``torch.save`` nothing is held in memory but the buffers of the
writer, tensors can be made when their turn comes, and checksums are computed meanwhile.
"""

from __future__ import annotations

import bisect
import functools
import io
import math
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import smp._C as _C
from smp.checkpoint.manifest import ITEM_BYTES, FileRecord
from smp.checkpoint.zip_stream import ZipStream

#: Keys and indices from the top of the structure to a tensor.
Keys = tuple[Any, ...]

_PIECE_BYTES = 32 << 20
_ZIP_VERSION = b"3\n"
_STORAGE_NAMES: dict[torch.dtype, str] = torch.storage._dtype_to_storage_type_map()
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


@dataclass(frozen=True)
class Deferred:
    """A tensor that is made when its turn to be written comes, and freed afterwards.

    Attributes:
        make: yields a tensor of this shape and dtype, on any device, contiguous or not.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self) -> Iterator[torch.Tensor]:
        """Makes the tensor; returns contiguous pieces of it, in row-major order.

        Raises:
            ValueError: the tensor has another shape or dtype than announced.
        """
        tensor = self.make().detach()
        if tuple(tensor.shape) != tuple(self.shape) or tensor.dtype != self.dtype:
            raise ValueError(
                f"a deferred tensor was announced as {self.dtype} {list(self.shape)} and arrived "
                f"as {tensor.dtype} {list(tensor.shape)}"
            )
        return _contiguous_pieces(tensor)


AnyTensor = torch.Tensor | Deferred


@dataclass(frozen=True)
class Place:
    """The place of a tensor in the file: contiguous, row-major, from byte ``offset`` on."""

    keys: Keys
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Written:
    """A finished file: its record for the manifest, and its tensors in the order of ``keys``."""

    record: FileRecord
    places: list[Place]


@dataclass(frozen=True)
class WriteOptions:
    """Options of writing a file; memory is ``num_buffers * buffer_bytes``.

    Attributes:
        chunk_bytes: number of bytes that one checksum of the manifest covers.
        progress: called after each tensor with the number of bytes so far.
    """

    buffer_bytes: int = 32 << 20
    num_buffers: int = 2
    chunk_bytes: int = 4 << 20
    progress: Callable[[int], None] = lambda _: None


DEFAULTS = WriteOptions()


def write(path: Path, structure: Any, options: WriteOptions = DEFAULTS) -> Written:
    """Writes and synchronises ``path``.

    Tensors that share memory share it in the file, too, if they are contiguous. Parameters are
    written as tensors; ``requires_grad`` is not kept. No tensor may change before this returns.

    Args:
        structure: dictionaries, lists, tuples, numbers, strings, bytes, None, torch's sizes,
            dtypes and devices, tensors on any device, :class:`Deferred`.

    Raises:
        ValueError: the structure has an object of another kind; the text has its place.
        RuntimeError: the file cannot be written; the text has its name.
    """
    found = list(_tensors(structure, ()))
    storages, views = _storages_of([tensor for _, tensor in found])
    begins = []
    with Writing(path, options) as writing:
        stream = ZipStream(writing.writer)
        stream.add_bytes(f"{path.stem}/data.pkl", _pickled(structure, views))
        stream.add_bytes(f"{path.stem}/byteorder", sys.byteorder.encode())
        for storage in storages:
            name = f"{path.stem}/data/{storage.idx}"
            num_bytes = storage.numel * storage.tensor.dtype.itemsize
            append = functools.partial(storage.append_to, writing.writer)
            begins.append(stream.add(name, num_bytes, append))
            options.progress(writing.writer.bytes_written)
        stream.add_bytes(f"{path.stem}/version", _ZIP_VERSION)
        stream.close()
    places = []
    for keys, tensor in found:
        storage, offset = views[id(tensor)]
        begin = begins[storage.idx] + offset * tensor.dtype.itemsize
        places.append(Place(keys, begin, tensor.dtype, tuple(tensor.shape)))
    return Written(writing.record, places)


def append_tensor(writer: _C.FileWriter, tensor: torch.Tensor) -> None:
    """Writes an archive with one tensor behind what a writer has, as ``torch.save`` does."""
    [storage], views = _storages_of([tensor])
    stream = ZipStream(writer)
    stream.add_bytes("archive/data.pkl", _pickled(tensor, views))
    stream.add_bytes("archive/byteorder", sys.byteorder.encode())
    num_bytes = storage.numel * tensor.dtype.itemsize
    stream.add("archive/data/0", num_bytes, functools.partial(storage.append_to, writer))
    stream.add_bytes("archive/version", _ZIP_VERSION)
    stream.close()


class Writing:
    """A block that writes one file; the end synchronises it, and an error deletes it.

    Attributes:
        writer: takes the bytes inside of the block.
        record: record of the file after the block.
    """

    record: FileRecord

    def __init__(self, path: Path, options: WriteOptions) -> None:
        self._chunk_bytes = options.chunk_bytes
        self.writer = _C.FileWriter(
            str(path), options.buffer_bytes, options.num_buffers, options.chunk_bytes
        )

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                num_bytes, crcs = self.writer.finish()
                self.record = FileRecord(num_bytes, self._chunk_bytes, tuple(crcs))
        finally:
            if not hasattr(self, "record"):
                self.writer.abandon()


def _tensors(value: Any, keys: Keys) -> Iterator[tuple[Keys, AnyTensor]]:
    """Yields the tensors of a structure with their keys; refuses objects of other kinds."""
    kind = type(value)
    if isinstance(value, AnyTensor):
        is_there = isinstance(value, Deferred) or (
            value.layout == torch.strided and value.device.type != "meta"
        )
        if not is_there or str(value.dtype).removeprefix("torch.") not in ITEM_BYTES:
            raise _unfit(value, keys)
        yield keys, value
    elif kind in (dict, OrderedDict):
        for key, item in value.items():
            _check_key(key, keys)
            yield from _tensors(item, (*keys, key))
    elif kind in (list, tuple):
        for i, item in enumerate(value):
            yield from _tensors(item, (*keys, i))
    elif kind not in _PLAIN:
        raise _refused(value, keys)


def _check_key(key: Any, keys: Keys) -> None:
    for item in key if type(key) is tuple else ():
        _check_key(item, keys)
    if type(key) is not tuple and type(key) not in _PLAIN:
        raise _refused(key, (*keys, "a key"))


def _unfit(value: AnyTensor, keys: Keys) -> ValueError:
    what = "tensor"
    if isinstance(value, torch.Tensor):
        what = f"{value.layout} on {value.device}"
    return ValueError(
        f"cannot write the tensor at {_path(keys)} ({value.dtype}, {what}): it must be strided and "
        f"of a dtype among {', '.join(ITEM_BYTES)}"
    )


def _refused(value: Any, keys: Keys) -> ValueError:
    kind = type(value)
    return ValueError(
        f"cannot write {kind.__module__}.{kind.__qualname__} at {_path(keys)}: give dictionaries, "
        "lists, tuples, numbers, strings, bytes and tensors"
    )


def _path(keys: Keys) -> str:
    return "".join(f"[{key!r}]" for key in keys) or "the top"


@dataclass(frozen=True)
class _Storage:
    """Elements that the file holds as one record, ``data/<idx>``.

    Attributes:
        idx: number of the record.
        tensor: first tensor in it.
        begin: first element in the memory of ``tensor``; None: ``tensor`` is written alone,
            whatever its strides are.
        numel: number of elements.
    """

    idx: int
    tensor: AnyTensor
    begin: int | None
    numel: int

    def append_to(self, writer: _C.FileWriter) -> None:
        if isinstance(self.tensor, Deferred):
            pieces = self.tensor.pieces()
        elif self.begin is None:
            pieces = _contiguous_pieces(self.tensor.detach())
        else:
            pieces = iter((self.tensor.detach().as_strided((self.numel,), (1,), self.begin),))
        for piece in pieces:
            writer.append_tensor(piece)


def _contiguous_pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensor in row-major order, copied piece by piece if it is not contiguous."""
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        num_bytes = tensor.numel() * tensor.dtype.itemsize
        if tensor.dim() == 0 or num_bytes <= _PIECE_BYTES:
            yield tensor.resolve_conj().resolve_neg().contiguous()
            return
        rows = max(1, _PIECE_BYTES * len(tensor) // num_bytes)
        for begin in range(0, len(tensor), rows):
            part = tensor[begin : begin + rows]
            if len(part) == 1:
                yield from _contiguous_pieces(part[0])
            else:
                yield part.resolve_conj().resolve_neg().contiguous()
    else:
        yield tensor


#: The storage of a tensor, and the offset of its first element there, by the tensor's id.
_Views = dict[int, tuple[_Storage, int]]


def _storages_of(tensors: Sequence[AnyTensor]) -> tuple[list[_Storage], _Views]:
    """Returns storages in the order in which they are needed, and each tensor's place in one.

    Contiguous tensors that overlap in memory are in one storage. Tensors that merely lie side by
    side are not, because a process that loads one would hold both. Each other tensor has a storage
    of its own.
    """
    spans: dict[Any, list[tuple[int, int]]] = {}  # by memory: begins and ends of tensors
    places: dict[int, tuple[Any, int]] = {}  # by id of the tensor: memory and begin
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.numel() and tensor.is_contiguous():
            if not (tensor.is_conj() or tensor.is_neg()):
                memory = tensor.device, tensor.untyped_storage()._cdata, tensor.dtype
                first = int(tensor.storage_offset())
                places[id(tensor)] = memory, first
                spans.setdefault(memory, []).append((first, first + tensor.numel()))
    joined = {memory: _joined(sorted(found)) for memory, found in spans.items()}
    storages: dict[Any, _Storage] = {}
    views: _Views = {}
    for tensor in tensors:
        name: Any = id(tensor)
        begin: int | None = None
        end, offset = math.prod(tensor.shape), 0
        if name in places:
            memory, first = places[name]
            runs = joined[memory]
            begin, end = runs[bisect.bisect_right(runs, (first, sys.maxsize)) - 1]
            name, offset = (memory, begin), first - begin
        if name not in storages:
            storages[name] = _Storage(len(storages), tensor, begin, end - (begin or 0))
        views[id(tensor)] = storages[name], offset
    return list(storages.values()), views


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins sorted spans that overlap."""
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        if joined and begin < joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _pickled(structure: Any, views: _Views) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, views).dump(structure)
    return buffer.getvalue()


class _Id(tuple[Any, ...]):
    """The persistent id of a storage, by which ``torch.load`` finds its record."""


class _Pickler(pickle.Pickler):
    """Pickles a structure whose tensors refer to storages."""

    def __init__(self, file: io.BytesIO, views: _Views) -> None:
        super().__init__(file, protocol=2)
        self._views = views

    def persistent_id(self, obj: Any) -> Any:
        return tuple(obj) if type(obj) is _Id else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, AnyTensor):
            return NotImplemented
        storage, offset = self._views[id(obj)]
        dtype, shape = obj.dtype, tuple(obj.shape)
        kind, count = torch.UntypedStorage, storage.numel * dtype.itemsize
        if dtype in _STORAGE_NAMES:
            kind, count = getattr(torch, _STORAGE_NAMES[dtype]), storage.numel
        reference = _Id(("storage", kind, str(storage.idx), "cpu", count))
        strides = torch.empty(shape, device="meta").stride()
        arguments: tuple[Any, ...] = (reference, offset, shape, strides, False, OrderedDict())
        if dtype in _STORAGE_NAMES:
            return torch._utils._rebuild_tensor_v2, arguments
        return torch._utils._rebuild_tensor_v3, (*arguments, dtype)
