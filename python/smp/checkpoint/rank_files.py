"""Files of which each rank writes its own: their names, and how another layout reads them."""

from __future__ import annotations

import copy
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from smp import _C
from smp.optim.state import FLAT_MARK, join_flat
from smp.tensor_parallel import partial
from smp.tensor_parallel.partial import LAYOUT_MARK, PARTIAL_MARK, SHARDS_MARK
from smp.world import comm

Layout = tuple[int, int, int]


def suffix() -> str:
    """What this rank appends to the name of a file that its replicas share."""
    if comm.tp_size() > 1:
        return f"_{comm.pp_rank()}_{comm.tp_rank()}"
    return f"_{comm.mp_rank()}"


def own_suffix() -> str:
    """What this rank appends to the name of a file that nobody else writes."""
    return f"_{comm.pp_rank()}_{comm.tp_rank()}_{comm.rdp_rank()}"


def with_layout(obj: Any, is_own: bool) -> Any:
    """A copy of ``obj`` whose partial state dicts say by how many ranks they were written."""
    if not isinstance(obj, Mapping) or not has_partial(obj):
        return obj
    marked: Any = copy.copy(obj)
    if obj.get(PARTIAL_MARK):
        marked[LAYOUT_MARK] = _current(is_own)
        return marked
    for key, value in obj.items():
        marked[key] = with_layout(value, is_own)
    return marked


def load_any_layout(path: Path, load: Callable[..., Any]) -> Any:
    """What this rank's file has; the whole of all files if they are of another layout.

    Args:
        path: without suffix.
        load: of one file; also takes ``mmap``.

    Raises:
        FileNotFoundError: naming the files that were looked for and those that are there.
    """
    # That of this layout first; older files may have another one.
    others = (f"_{comm.mp_rank()}", f"_{comm.pp_rank()}_{comm.tp_rank()}", own_suffix())
    ends = tuple(dict.fromkeys((suffix(), *others)))
    own = next((end for end in ends if _with(path, end).is_file()), None)
    # The first file is of the last save even where one of more ranks has left files behind.
    firsts = ["_0", "_0_0", "_0_0_0"] if own is None else [re.sub(r"\d+", "0", own)]
    first = next((end for end in firsts if _with(path, end).is_file()), own)
    loaded = load(_with(path, own)) if own is not None and own == first else None
    if loaded is not None:
        layout = _layout_in(loaded)
    elif first is not None and zipfile.is_zipfile(_with(path, first)):
        layout = _layout_in(load(_with(path, first), mmap=True))
    else:
        layout = None
    if layout is not None and layout != _current(layout[2] > 0):
        parts = [load(_with(path, end)) for end in _suffixes(layout)]
        return merge([_without_layout(part) for part in parts], layout)
    if own is None:
        there = sorted(p.name for p in path.parent.glob("*") if p.name.startswith(path.name))
        raise FileNotFoundError(
            f"{_C.rank_prefix()}none of {[path.name + end for end in ends]} exists in "
            f"{path.parent}; files with this beginning: {there or 'none'}. Load a full file with "
            "partial=False"
        )
    return _without_layout(load(_with(path, own)) if loaded is None else loaded)


def has_partial(obj: Any) -> bool:
    """Is there a partial state dict in nested dictionaries?"""
    if isinstance(obj, Mapping):
        return bool(obj.get(PARTIAL_MARK)) or any(has_partial(v) for v in obj.values())
    return False


def merge(parts: Sequence[Any], layout: Layout | None = None) -> Any:
    """One object out of those of all ranks; partial dictionaries become whole ones.

    Args:
        parts: of the ranks of a replica, or of all ranks of `layout`, in the order of suffixes.
        layout: of files; needed for sharded states of optimizers.
    """
    first = parts[0]
    if not isinstance(first, Mapping):
        return first
    if not first.get(PARTIAL_MARK):
        return {key: merge([part[key] for part in parts], layout) for key in first}
    if "state" in first and "param_groups" in first:  # of an optimizer
        if any(part.get(FLAT_MARK) is not None for part in parts):
            parts = _without_cuts(parts, layout)
        states = [{**part["state"], SHARDS_MARK: part.get(SHARDS_MARK, {})} for part in parts]
        marks = (PARTIAL_MARK, SHARDS_MARK, FLAT_MARK)
        merged = {key: value for key, value in first.items() if key not in marks}
        return {**merged, "state": partial.merge(states, partial.join_optimizer_entries)}
    return partial.merge(parts)


def _without_cuts(parts: Sequence[Any], layout: Layout | None) -> list[Any]:
    """One state of whole parameters, or slices of them, for all ranks of a shard group."""
    if layout is None or layout[2] == 0:
        raise ValueError(
            f"{_C.rank_prefix()}a sharded optimizer state cannot become part of one file; save "
            "optimizer.state_dict(), or local_state_dict() with partial=True"
        )
    num_replicas = layout[2]
    groups = [parts[i : i + num_replicas] for i in range(0, len(parts), num_replicas)]
    return [
        {**group[0], "state": join_flat([(p["state"], p.get(FLAT_MARK) or {}) for p in group])}
        for group in groups
    ]


def _current(is_own: bool) -> Layout:
    return comm.pp_size(), comm.tp_size(), comm.rdp_size() if is_own else 0


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
    """State dicts are loaded as they were given to be saved."""
    if isinstance(obj, dict):
        obj.pop(LAYOUT_MARK, None)
        for value in obj.values():
            _without_layout(value)
    return obj
