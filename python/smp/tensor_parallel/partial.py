"""Marks state dicts of which every rank has a part, and merges them into whole ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

import smp._C as _C
from smp.tensor_parallel.cutting import join
from smp.tensor_parallel.parts import Part
from smp.tensor_parallel.sharding import Interval, PackedInterval, interval_of

#: Marks a dict as the part of one rank.
PARTIAL_MARK = "_smp_is_partial"
#: In such a dict: the slice that an entry is, by key, as ``(dim, begin, end, extent)``; for packed
#: matrices with the sizes of the whole, in which ``dim`` counts, as a fifth item.
SHARDS_MARK = "_smp_shards"
#: In such a dict: the elements of the flattened slice that an entry has, by key, as
#: ``(begin, numel, shape of the slice)``. Only entries that are cut further are listed.
FLAT_MARK = "_smp_flat"
#: The master of a 16-bit parameter, in its entry of an optimizer's state.
MASTER = "_smp_master"
#: In such a dict of an optimizer: whether this rank has the state of a whole tensor of which ranks
#: hold parts, by key. Only tensors that are updated by owners are listed; the other marks of their
#: entries are those of masters.
OWNED_MARK = "_smp_owned"
#: In such a dict of a file: ``(pp, tp, rdp)`` degrees of the job that wrote it, with rdp 0 where
#: the replicas share a file. It shows ranks of another layout that they need all files.
LAYOUT_MARK = "_smp_layout"
#: Keys of a partial dict that are marks, not entries.
MARKS = frozenset({PARTIAL_MARK, SHARDS_MARK, FLAT_MARK, OWNED_MARK, LAYOUT_MARK})

# The types in files: plain tuples, which `torch.load(..., weights_only=True)` takes.
Slice = tuple[int, int, int, int] | tuple[int, int, int, int, tuple[int, ...]]
Flat = tuple[int, int, tuple[int, ...]]
_Marked = tuple[Any, Slice | None, Flat | None]


def slices_of(named: Iterable[tuple[Any, Any]]) -> dict[Any, Slice]:
    """Returns the slices that this rank holds of split parameters, by key."""
    return slice_marks((key, interval_of(p)) for key, p in named if isinstance(p, Tensor))


def slice_marks(intervals: Iterable[tuple[Any, Interval | None]]) -> dict[Any, Slice]:
    """Returns the marks of slices, by key; whole tensors (None) get none."""
    return {key: _mark(interval) for key, interval in intervals if interval is not None}


def _mark(i: Interval) -> Slice:
    if isinstance(i, PackedInterval):
        return i.dim, i.begin, i.end, i.extent, i.view
    return i.dim, i.begin, i.end, i.extent


def marks_of(
    slices: Mapping[Any, Slice],
    flat: Mapping[Any, Flat] | None,
    owned: Mapping[Any, bool] | None = None,
) -> dict[str, Any]:
    """Returns the marks of a partial dict.

    Args:
        slices: slices of the entries that are slices.
        flat: ranges of the entries that are cut further; None: no entry can be.
        owned: flags of the entries that only owners have.
    """
    return {
        PARTIAL_MARK: True,
        **({SHARDS_MARK: dict(slices)} if slices else {}),
        **({FLAT_MARK: dict(flat)} if flat is not None else {}),
        **({OWNED_MARK: dict(owned)} if owned else {}),
    }


def merge(states: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Merges the dicts of several ranks into a whole one.

    Args:
        states: tensors, or an optimizer's entries of tensors, with their marks. Among unmarked
            entries with the same key the first counts, and so it does among elements that several
            dicts have.

    Raises:
        ValueError: elements are missing.
    """
    whole: dict[Any, Any] = {}
    marked: dict[Any, list[_Marked]] = {}
    of_owners: dict[Any, dict[Any, Any]] = {}
    for state in states:
        slices, flats = state.get(SHARDS_MARK) or {}, state.get(FLAT_MARK) or {}
        owned = state.get(OWNED_MARK) or {}
        for key, value in state.items():
            if key in MARKS:
                continue
            if key in owned:
                rest = {name: item for name, item in value.items() if name != MASTER}
                of_owners[key] = of_owners.get(key) or rest
                value = {name: item for name, item in value.items() if name == MASTER}
            whole.setdefault(key, value)
            slice_, flat = slices.get(key), flats.get(key)
            is_empty = flat is not None and flat[1] == 0
            if (slice_ is not None or flat is not None) and not is_empty:
                marked.setdefault(key, []).append((value, slice_, flat))
    for key, pieces in marked.items():
        try:
            whole[key] = _joined(pieces)
        except ValueError as error:
            raise ValueError(
                f"{_C.rank_prefix()}'{key}' {error}; give the parts of all tensor-parallel ranks, "
                "and of all ranks that shard it together"
            ) from None
    return whole | {key: {**rest, **whole[key]} for key, rest in of_owners.items()}


def _joined(pieces: Sequence[_Marked]) -> Any:
    """Returns a whole tensor, or an entry whose tensors with a number per element are whole."""
    first = pieces[0][0]
    if isinstance(first, Mapping):
        return {
            name: _joined([(entry[name], slice_, flat) for entry, slice_, flat in pieces])
            for name in first
        }
    found = [_part(*piece) for piece in pieces]
    if found[0] is None:
        return first
    parts = [(value, made[0]) for (value, _, _), made in zip(pieces, found, strict=True) if made]
    return join(parts, found[0][1])


def _part(
    value: Any, slice_: Slice | None, flat: Flat | None
) -> tuple[Part, tuple[int, ...]] | None:
    """Returns the part of the whole that a marked tensor is, and the sizes of the whole.

    Returns:
        part and sizes; None if the tensor does not have one number per element.
    """
    if not isinstance(value, Tensor):
        return None
    begin, numel, shape = 0, value.numel(), tuple(value.shape)
    if flat is not None and shape != tuple(flat[2]):
        begin, numel, sizes = flat
        if shape != (numel,):
            return None
        shape = tuple(sizes)
    if slice_ is None:
        return Part.flat(shape, begin, numel), shape
    if len(slice_) == 5:
        packed = PackedInterval(tuple(slice_[4]), *slice_[:4])
        if math.prod(shape) * packed.extent != math.prod(packed.view) * packed.size:
            return None
        return Part.of_slice(shape, packed, begin, numel), tuple(packed.shape)
    dim, first, end, extent = slice_
    if len(shape) <= dim or shape[dim] != end - first:
        return None
    whole = (*shape[:dim], extent, *shape[dim + 1 :])
    return Part(dim, first, end, extent, begin, numel), whole
