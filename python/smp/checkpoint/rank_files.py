"""Names files that each rank writes for itself, and reads them on another layout."""

from __future__ import annotations

import copy
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import smp._C as _C
from smp.tensor_parallel import partial
from smp.tensor_parallel.partial import FLAT_MARK, LAYOUT_MARK, PARTIAL_MARK
from smp.world.rank import Rank

Layout = tuple[int, int, int]


def suffix(rank: Rank, is_own: bool) -> str:
    """Returns the text that this rank appends to the name of a file.

    Args:
        rank: rank of this process.
        is_own: whether each rank has a file of its own; otherwise replicas share it.
    """
    places = rank.ranks
    if is_own:
        return f"_{places['pp']}_{places['tp']}_{places['rdp_cp']}"
    return f"_{places['pp']}_{places['tp']}" if rank.sizes["tp"] > 1 else f"_{places['mp']}"


def with_layout(obj: Any, rank: Rank, is_own: bool) -> Any:
    """Returns a copy of ``obj`` whose partial state dicts are marked with the layout."""
    if not isinstance(obj, Mapping) or not has_partial(obj):
        return obj
    marked: Any = copy.copy(obj)
    if obj.get(PARTIAL_MARK):
        marked[LAYOUT_MARK] = _layout_of(rank, is_own)
        return marked
    for key, value in obj.items():
        marked[key] = with_layout(value, rank, is_own)
    return marked


def load_any_layout(path: Path, load: Callable[..., Any], rank: Rank) -> Any:
    """Loads this rank's file, or merges all files if they are of another layout.

    Args:
        path: path without suffix.
        load: loads one file; also takes ``mmap``.
        rank: rank of this process.

    Raises:
        FileNotFoundError: no file fits; the text names the expected and the existing files.
    """
    # This layout's suffix comes first; older files may have another one.
    places = rank.ranks
    others = (f"_{places['mp']}", f"_{places['pp']}_{places['tp']}", suffix(rank, is_own=True))
    ends = tuple(dict.fromkeys((suffix(rank, is_own=False), *others)))
    own = next((end for end in ends if _with(path, end).is_file()), None)
    # The first file is of the last save even if an earlier one of more ranks has left files.
    firsts = ["_0", "_0_0", "_0_0_0"] if own is None else [re.sub(r"\d+", "0", own)]
    first = next((end for end in firsts if _with(path, end).is_file()), own)
    loaded = load(_with(path, own)) if own is not None and own == first else None
    if loaded is not None:
        layout = _layout_in(loaded)
    elif first is not None and zipfile.is_zipfile(_with(path, first)):
        layout = _layout_in(load(_with(path, first), mmap=True))
    else:
        layout = None
    if layout is not None and layout != _layout_of(rank, layout[2] > 0):
        parts = [load(_with(path, end)) for end in _suffixes(layout)]
        return merge([_without_layout(part) for part in parts], layout)
    if own is None:
        there = sorted(p.name for p in path.parent.glob("*") if p.name.startswith(path.name))
        raise FileNotFoundError(
            f"{_C.rank_prefix()}none of {[path.name + end for end in ends]} exists in "
            f"{path.parent}; files with this prefix: {there or 'none'}. Load a full file with "
            "partial=False"
        )
    return _without_layout(load(_with(path, own)) if loaded is None else loaded)


def has_partial(obj: Any) -> bool:
    """Returns whether nested dictionaries contain a partial state dict."""
    if isinstance(obj, Mapping):
        return bool(obj.get(PARTIAL_MARK)) or any(has_partial(v) for v in obj.values())
    return False


def has_cut(obj: Any) -> bool:
    """Returns whether nested dictionaries contain a rank's part of a sharded optimizer state."""
    if isinstance(obj, Mapping):
        return obj.get(FLAT_MARK) is not None or any(has_cut(v) for v in obj.values())
    return False


def merge(parts: Sequence[Any], layout: Layout | None = None) -> Any:
    """Merges the objects of all ranks into one; partial dictionaries become whole ones.

    Args:
        parts: objects of the ranks of a replica, or of all ranks of `layout`, in the order of
            suffixes.
        layout: layout of the files; needed for sharded states of optimizers.
    """
    first = parts[0]
    if not isinstance(first, Mapping):
        return first
    if not first.get(PARTIAL_MARK):
        return {key: merge([part[key] for part in parts], layout) for key in first}
    if "state" not in first or "param_groups" not in first:
        return partial.merge(parts)
    is_cut = any(part.get(FLAT_MARK) is not None for part in parts)
    if is_cut and (layout is None or layout[2] == 0):
        raise ValueError(
            f"{_C.rank_prefix()}a sharded optimizer state cannot become part of one file; save "
            "optimizer.state_dict(), or local_state_dict() with partial=True"
        )
    marked = [
        {**part["state"], **{k: part[k] for k in partial.MARKS & part.keys()}} for part in parts
    ]
    rest = {key: value for key, value in first.items() if key not in partial.MARKS}
    return {**rest, "state": partial.merge(marked)}


def _layout_of(rank: Rank, is_own: bool) -> Layout:
    return rank.sizes["pp"], rank.sizes["tp"], rank.sizes["rdp_cp"] if is_own else 0


def _with(path: Path, end: str) -> Path:
    return path.with_name(path.name + end)


def _suffixes(layout: Layout) -> list[str]:
    pp, tp, rdp = layout
    ends = [f"_{i}" for i in range(pp)]
    if tp > 1 or rdp > 0:
        ends = [f"{end}_{i}" for end in ends for i in range(tp)]
    if rdp > 0:
        ends = [f"{end}_{i}" for end in ends for i in range(rdp)]
    return ends


def _layout_in(obj: Any) -> Layout | None:
    if not isinstance(obj, Mapping):
        return None
    if LAYOUT_MARK in obj:
        pp, tp, rdp = obj[LAYOUT_MARK]
        return int(pp), int(tp), int(rdp)
    return next((found for v in obj.values() if (found := _layout_in(v)) is not None), None)


def _without_layout(obj: Any) -> Any:
    """Removes the layout marks, so that state dicts are as the caller saved them."""
    if isinstance(obj, dict):
        obj.pop(LAYOUT_MARK, None)
        for value in obj.values():
            _without_layout(value)
    return obj
