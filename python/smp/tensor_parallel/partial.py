"""State of which every rank has a part: what belongs together, and how it becomes whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from smp import _C
from smp.tensor_parallel.sharding import interval_of, join

#: Marks a dict as the part of one rank.
PARTIAL_MARK = "_smp_is_partial"
#: In such a dict: which slice an entry is, by key, as ``(dim, begin, end, extent)``.
SHARDS_MARK = "_smp_shards"
#: In such a dict of a file: ``(pp, tp, rdp)`` degrees of the job that wrote it, with rdp 0 where
#: the replicas share a file. Ranks of another layout see from it that they need all files.
LAYOUT_MARK = "_smp_layout"
#: Keys of a partial dict that are no entries.
MARKS = frozenset({PARTIAL_MARK, SHARDS_MARK, LAYOUT_MARK})

Slice = tuple[int, int, int, int]


def slices_of(named: Iterable[tuple[Any, Any]]) -> dict[Any, Slice]:
    """The slices that this rank holds of split parameters, by key."""
    slices = {}
    for key, parameter in named:
        interval = interval_of(parameter) if isinstance(parameter, Tensor) else None
        if interval is not None:
            slices[key] = (interval.dim, interval.begin, interval.end, interval.extent)
    return slices


def interval(slice_: Slice | None) -> _C.ShardInterval | None:
    """The interval that a slice stands for."""
    return None if slice_ is None else _C.ShardInterval(*slice_)


def merge(
    parts: Sequence[Mapping[Any, Any]],
    join_entries: Callable[[list[tuple[Any, Slice]]], Any] | None = None,
) -> dict[Any, Any]:
    """The whole out of the dicts of all ranks of a replica.

    Args:
        parts: with their marks. Of entries that several have and that are not split, the first
            counts; a slice that several have counts once.
        join_entries: puts slices of one entry together; tensors are joined if it is not given.

    Raises:
        ValueError: slices are missing.
    """
    whole: dict[Any, Any] = {}
    slices: dict[Any, dict[int, tuple[Any, Slice]]] = {}
    for part in parts:
        held = part.get(SHARDS_MARK, {})
        for key, value in part.items():
            if key in MARKS:
                continue
            if key in held:
                whole.setdefault(key, None)  # keeps the place
                slices.setdefault(key, {}).setdefault(held[key][1], (value, held[key]))
            else:
                whole.setdefault(key, value)
    for key, by_begin in slices.items():
        pieces = [by_begin[begin] for begin in sorted(by_begin)]
        _check_complete(key, [slice_ for _, slice_ in pieces])
        whole[key] = (join_entries or join_tensors)(pieces)
    return whole


def join_tensors(pieces: list[tuple[Tensor, Slice]]) -> Tensor:
    """The whole tensor out of all its slices."""
    return join([(tensor, interval(slice_)) for tensor, slice_ in pieces])


def join_optimizer_entries(pieces: list[tuple[dict[str, Any], Slice]]) -> dict[str, Any]:
    """An optimizer's state of a whole parameter out of those of its slices."""
    first, (dim, begin, end, _) = pieces[0]
    whole = dict(first)
    for name, value in first.items():
        if isinstance(value, Tensor) and value.dim() > dim and value.shape[dim] == end - begin:
            whole[name] = join_tensors([(entry[name], slice_) for entry, slice_ in pieces])
    return whole


def _check_complete(key: object, slices: list[Slice]) -> None:
    end = 0
    for _, begin, this_end, _ in slices:
        if begin != end:
            break
        end = this_end
    if end != slices[0][3]:
        held = ", ".join(f"[{begin}, {this_end})" for _, begin, this_end, _ in slices)
        raise ValueError(
            f"{_C.rank_prefix()}'{key}' is split along dim {slices[0][0]} of size {slices[0][3]}, "
            f"but only {held} are there; give the parts of all tensor-parallel ranks"
        )
