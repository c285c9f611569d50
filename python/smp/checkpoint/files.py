"""``smp.save`` and ``smp.load``: one file for the whole job, or one per rank."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

import smp._C as _C
from smp.checkpoint import file_generation, rank_files
from smp.config import given_files
from smp.world import comm, roll_call, runtime

_SNIPPET = (
    "if smp.rdp_rank() == 0:  # or on all ranks\n"
    '        smp.save({"model": model.local_state_dict()}, path, partial=False)'
)


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

    Raises:
        ValueError: the folder does not exist.
        PeerFailure, RuntimeError: parts are to be merged, and some ranks have not called it.
    """
    rank = runtime.current().rank
    path = Path(f)
    if partial:
        path = path.with_name(path.name + rank_files.suffix(rank, is_own=v3))
        obj = rank_files.with_layout(obj, rank, is_own=v3)
    elif rank_files.has_partial(obj):
        roll_call.meet(rank, "smp.save", ("mp",), _SNIPPET)
        parts = comm.allgather(obj, comm.MP_GROUP)
        if rank.ranks["mp"] != 0:
            return
        obj = rank_files.merge(parts)
    if not path.parent.is_dir():
        raise ValueError(
            f"{_C.rank_prefix()}cannot save {path}: folder {path.parent} does not exist"
        )
    file_generation.write_alone(
        path,
        lambda file: torch.save(
            obj, file, pickle_module=pickle_module, pickle_protocol=pickle_protocol
        ),
    )


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
        partial: load this rank's file, whatever its suffix; else ``f`` itself. Files of another
            layout that hold partial state dicts are all read by each rank, and make whole ones.
        back_compat: accepted; there are no files of older libraries that need it.
        pickle_load_args: for ``torch.load``. Objects other than tensors and containers need
            ``weights_only=False``, which runs code of the file: use it for your own files only.

    Raises:
        FileNotFoundError: naming the files that were looked for and those that are there.
    """
    location = "cpu" if map_location is None else map_location
    if pickle_load_args.get("weights_only") is False:
        pickle_load_args["pickle_module"] = pickle_module

    def load_file(path: Path, mmap: bool | None = None) -> Any:
        given_files.check_regular(path)
        options = pickle_load_args if mmap is None else {**pickle_load_args, "mmap": mmap}
        try:
            return torch.load(path, map_location=location, **options)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{path} holds objects other than tensors and plain containers ({error}); if the "
                "file is your own, load it with weights_only=False"
            ) from error

    if partial:
        return rank_files.load_any_layout(Path(f), load_file, runtime.current().rank)
    if not Path(f).exists():
        there = sorted(p.name for p in Path(f).parent.glob("*") if p.name.startswith(Path(f).name))
        raise FileNotFoundError(
            f"{_C.rank_prefix()}{f} does not exist; files with this beginning: {there or 'none'}. "
            "Load files of ranks with partial=True"
        )
    return load_file(Path(f))
