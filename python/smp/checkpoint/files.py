"""``smp.save`` and ``smp.load``: one file for the whole job, or one per rank."""

from __future__ import annotations

import glob
import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from smp import _C, comm, runtime
from smp.optimizer_state import FLAT_MARK
from smp.tensor_parallel import partial
from smp.tensor_parallel.partial import PARTIAL_MARK, SHARDS_MARK


def save(
    obj: Any,
    f: str | os.PathLike[str],
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Saves ``obj`` with ``torch.save``; a crash leaves the previous file whole.

    Args:
        obj: anything that ``torch.save`` takes.
        f: path without the suffix of the rank.
        partial: every calling rank writes its own file, ``f_<mp_rank>``, with tensor parallelism
            ``f_<pp_rank>_<tp_rank>``. Otherwise the file is
            ``f``; partial state dicts inside of ``obj`` are then merged over the MP group first,
            which is collective, and its first rank writes.
        v3: one file per rank, ``f_<pp_rank>_<tp_rank>_<rdp_rank>``.
    """
    runtime.current()
    path = Path(f)
    if partial:
        path = path.with_name(path.name + (_v3_suffix() if v3 else _suffix()))
    elif _has_partial(obj):
        parts = comm.allgather(obj, comm.MP_GROUP)
        if comm.mp_rank() != 0:
            return
        obj = _merge(parts)
    if not path.parent.is_dir():
        raise ValueError(
            f"{_C.rank_prefix()}cannot save {path}: folder {path.parent} does not exist"
        )
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save(obj, file, pickle_module=pickle_module, pickle_protocol=pickle_protocol)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(
    f: str | os.PathLike[str],
    map_location: Any = None,
    pickle_module: Any = pickle,
    partial: bool = True,
    back_compat: bool = False,
    **pickle_load_args: Any,
) -> Any:
    """Loads what :func:`save` wrote; a full file may come from a run without smp.

    Args:
        f: path without the suffix of the rank.
        map_location: as in ``torch.load``; the CPU by default.
        partial: load this rank's file, whatever its suffix; else ``f`` itself.
        back_compat: accepted; there are no files of older libraries that need it.
        pickle_load_args: for ``torch.load``. Objects other than tensors and containers need
            ``weights_only=False``, which runs code of the file: use it for your own files only.

    Raises:
        FileNotFoundError: naming the files that were looked for and those that are there.
    """
    path = _existing(Path(f), partial)
    location = "cpu" if map_location is None else map_location
    if pickle_load_args.get("weights_only") is False:
        pickle_load_args["pickle_module"] = pickle_module
    try:
        return torch.load(path, map_location=location, **pickle_load_args)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds objects other than tensors and plain containers ({error}); if the file "
            "is your own, load it with weights_only=False"
        ) from error


def _suffix() -> str:
    if comm.tp_size() > 1:
        return f"_{comm.pp_rank()}_{comm.tp_rank()}"
    return f"_{comm.mp_rank()}"


def _v3_suffix() -> str:
    return f"_{comm.pp_rank()}_{comm.tp_rank()}_{comm.rdp_rank()}"


def _existing(path: Path, partial: bool) -> Path:
    if not partial:
        candidates = [path]
    else:
        # That of this layout first; older files may have another one.
        others = (f"_{comm.mp_rank()}", f"_{comm.pp_rank()}_{comm.tp_rank()}", _v3_suffix())
        suffixes = dict.fromkeys((_suffix(), *others))
        candidates = [path.with_name(path.name + suffix) for suffix in suffixes]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    there = sorted(Path(p).name for p in glob.glob(glob.escape(str(path)) + "*"))
    raise FileNotFoundError(
        f"{_C.rank_prefix()}none of {[c.name for c in candidates]} exists in "
        f"{path.parent}; files with this beginning: {there or 'none'}. Files of another layout "
        "need as many ranks as they were saved by; load a full file with partial=False"
    )


def _has_partial(obj: Any) -> bool:
    if isinstance(obj, Mapping):
        return bool(obj.get(PARTIAL_MARK)) or any(_has_partial(v) for v in obj.values())
    return False


def _merge(parts: list[Any]) -> Any:
    """One object out of those of all ranks; partial dictionaries become whole ones."""
    first = parts[0]
    if not isinstance(first, Mapping):
        return first
    if not first.get(PARTIAL_MARK):
        return {key: _merge([part[key] for part in parts]) for key in first}
    if "state" in first and "param_groups" in first:  # of an optimizer
        if first.get(FLAT_MARK):
            raise ValueError(
                f"{_C.rank_prefix()}a sharded optimizer state cannot become part of one file; save "
                "optimizer.state_dict(), or local_state_dict() with partial=True"
            )
        states = [{**part["state"], SHARDS_MARK: part.get(SHARDS_MARK, {})} for part in parts]
        merged = {
            key: value for key, value in first.items() if key not in (PARTIAL_MARK, SHARDS_MARK)
        }
        return {**merged, "state": partial.merge(states, partial.join_optimizer_entries)}
    return partial.merge(parts)
