"""Writes ``.pt`` files in one stream: the structure first, then storage after storage.

``torch.load(path, weights_only=True, mmap=True)`` reads them. The format is that of
``torch.save``: a zip file of stored records, ``data.pkl`` (protocol 2, storages as persistent
ids) and ``data/<n>``. Unlike ``torch.save`` nothing is held in memory but the buffers of the
writer, tensors can be made when their turn comes, and checksums are computed meanwhile.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import smp._C as _C
from smp.checkpoint.aliases import View, find_views
from smp.checkpoint.manifest import ITEM_BYTES, FileRecord
from smp.checkpoint.zip_stream import ZipStream

#: Keys and indices from the top of the structure to a tensor.
Keys = tuple[Any, ...]

_PIECE_BYTES = 32 << 20
_STORAGE_NAMES: dict[torch.dtype, str] = torch.storage._dtype_to_storage_type_map()
_PLAIN = (bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


@dataclass(frozen=True)
class Deferred:
    """A tensor that is made when its turn to be written comes, and freed afterwards.

    Attributes:
        make: yields a tensor of this shape and dtype, on any device, contiguous or not.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

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
    progress: Callable[[int], None] | None = None


def write(path: Path, structure: Any, options: WriteOptions | None = None) -> Written:
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
    options = options or WriteOptions()
    writer = _C.FileWriter(
        str(path), options.buffer_bytes, options.num_buffers, options.chunk_bytes
    )
    try:
        places = _write(writer, structure, path.stem, options.progress)
        num_bytes, crcs = writer.finish()
    except BaseException:
        writer.abandon()
        raise
    return Written(FileRecord(num_bytes, options.chunk_bytes, tuple(crcs)), places)


def _write(
    writer: _C.FileWriter, structure: Any, name: str, progress: Callable[[int], None] | None
) -> list[Place]:
    found: list[tuple[Keys, torch.Tensor | Deferred]] = []
    mirror = _Walk(found).copy(structure, ())
    records = _records_of([tensor for _, tensor in found])
    stream = ZipStream(writer)
    stream.add_bytes(f"{name}/data.pkl", _pickled(mirror, records))
    stream.add_bytes(f"{name}/byteorder", sys.byteorder.encode())
    begins = []
    for idx, record in enumerate(records.sources):
        begins.append(
            stream.add(
                f"{name}/data/{idx}", record.num_bytes, functools.partial(record.write, writer)
            )
        )
        if progress is not None:
            progress(writer.bytes_written)
    stream.add_bytes(f"{name}/version", b"3\n")
    stream.close()
    return [
        Place(keys, begins[v.run_idx] + v.offset * tensor.dtype.itemsize, tensor.dtype, shape)
        for (keys, tensor), v, shape in zip(
            found, records.views, (tuple(t.shape) for _, t in found), strict=True
        )
    ]


@dataclass(frozen=True)
class _Ref:
    """A reference to tensor ``idx`` in the structure that is pickled."""

    idx: int


@dataclass(frozen=True)
class _StorageRef:
    persistent_id: tuple[str, type, str, str, int]


class _Walk:
    """Copies a structure, with references in the place of tensors."""

    def __init__(self, found: list[tuple[Keys, torch.Tensor | Deferred]]) -> None:
        self._found = found

    def copy(self, value: Any, keys: Keys) -> Any:
        if isinstance(value, torch.Tensor | Deferred):
            _check_tensor(value, keys)
            ref = _Ref(len(self._found))
            self._found.append((keys, value.detach() if isinstance(value, torch.Tensor) else value))
            return ref
        kind = type(value)
        if value is None or kind in _PLAIN:
            return value
        if kind in (dict, OrderedDict):
            for key in value:
                self._check_key(key, keys)
            return kind((key, self.copy(item, (*keys, key))) for key, item in value.items())
        if kind in (list, tuple):
            return kind(self.copy(item, (*keys, i)) for i, item in enumerate(value))
        raise _refused(value, keys)

    def _check_key(self, key: Any, keys: Keys) -> None:
        if type(key) is tuple:
            for item in key:
                self._check_key(item, keys)
        elif key is not None and type(key) not in _PLAIN:
            raise _refused(key, (*keys, "a key"))


def _check_tensor(value: torch.Tensor | Deferred, keys: Keys) -> None:
    name = str(value.dtype).removeprefix("torch.")
    is_other = isinstance(value, torch.Tensor) and (
        value.layout != torch.strided or value.device.type == "meta"
    )
    if name not in ITEM_BYTES or is_other:
        what = f"{value.layout} on {value.device}" if isinstance(value, torch.Tensor) else "tensor"
        raise ValueError(
            f"cannot write the tensor at {_path(keys)} ({value.dtype}, {what}): it must be strided "
            f"and of a dtype among {', '.join(ITEM_BYTES)}"
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
class _Source:
    """The bytes of one storage."""

    tensor: torch.Tensor | Deferred
    begin: int | None
    numel: int

    @property
    def num_bytes(self) -> int:
        return self.numel * self.tensor.dtype.itemsize

    def write(self, writer: _C.FileWriter) -> None:
        tensor = self.tensor
        if isinstance(tensor, Deferred):
            pieces = tensor.pieces()
        elif self.begin is not None:
            pieces = iter((tensor.as_strided((self.numel,), (1,), self.begin),))
        else:
            pieces = _contiguous_pieces(tensor)
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


@dataclass(frozen=True)
class _Records:
    tensors: list[torch.Tensor | Deferred]
    sources: list[_Source]
    views: list[View]


def _records_of(tensors: list[torch.Tensor | Deferred]) -> _Records:
    """Returns one record per storage, in the order in which the structure names them."""
    there = [t for t in tensors if isinstance(t, torch.Tensor)]
    runs, views_there = find_views(there)
    sources: list[_Source] = []
    idx_of_run: dict[int, int] = {}
    idx_of_deferred: dict[int, int] = {}
    views = []
    next_view = iter(views_there)
    for tensor in tensors:
        if isinstance(tensor, Deferred):
            if id(tensor) not in idx_of_deferred:
                idx_of_deferred[id(tensor)] = len(sources)
                sources.append(_Source(tensor, None, math.prod(tensor.shape)))
            views.append(View(idx_of_deferred[id(tensor)], 0))
            continue
        view = next(next_view)
        if view.run_idx not in idx_of_run:
            idx_of_run[view.run_idx] = len(sources)
            run = runs[view.run_idx]
            sources.append(_Source(run.base, run.begin, run.numel))
        views.append(View(idx_of_run[view.run_idx], view.offset))
    return _Records(tensors, sources, views)


def _pickled(mirror: Any, records: _Records) -> bytes:
    storages = [_storage_ref(idx, source) for idx, source in enumerate(records.sources)]
    buffer = io.BytesIO()
    _Pickler(buffer, records, storages).dump(mirror)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, records: _Records, storages: list[_StorageRef]) -> None:
        super().__init__(file, protocol=2)
        self._records = records
        self._storages = storages

    def persistent_id(self, obj: Any) -> Any:
        return obj.persistent_id if isinstance(obj, _StorageRef) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, _Ref):
            return NotImplemented
        tensor = self._records.tensors[obj.idx]
        view = self._records.views[obj.idx]
        shape = tuple(tensor.shape)
        arguments: tuple[Any, ...] = (
            self._storages[view.run_idx],
            view.offset,
            shape,
            _strides(shape),
            False,
            OrderedDict(),
        )
        if tensor.dtype in _STORAGE_NAMES:
            return torch._utils._rebuild_tensor_v2, arguments
        return torch._utils._rebuild_tensor_v3, (*arguments, tensor.dtype)


def _storage_ref(idx: int, source: _Source) -> _StorageRef:
    dtype = source.tensor.dtype
    if dtype in _STORAGE_NAMES:
        kind, count = getattr(torch, _STORAGE_NAMES[dtype]), source.numel
    else:
        kind, count = torch.UntypedStorage, source.num_bytes
    return _StorageRef(("storage", kind, str(idx), "cpu", count))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
