"""Implements ``smp.save`` and ``smp.load``: one file for the whole job, or one per rank."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

import smp._C as _C
from smp.checkpoint import data_classes, file_generation, numpy_values, rank_files
from smp.config import given_files
from smp.world import comm, roll_call, runtime

_SNIPPET = (
    "if smp.rdp_rank() == 0:  # or on all ranks\n"
    '        smp.save({"model": model.local_state_dict()}, path, partial=False)'
)

#: Classes of objects that this process has saved, which `load` lets in.
_saved_classes: set[type] = set()


def save(
    obj: Any,
    f: str | os.PathLike[str],
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Saves ``obj`` with ``torch.save``; a crash leaves the previous file whole.

    Classes of the objects in it are noted, so that :func:`load` of this process reads them.

    Args:
        obj: any object that ``torch.save`` takes.
        f: path without the suffix of the rank.
        partial: whether each calling rank writes its own file, ``f_<mp_rank>``, or
            ``f_<pp_rank>_<tp_rank>`` with tensor parallelism. Of ranks that read one batch, those
            with a part of a sharded optimizer state do not write it. Otherwise the file is ``f``:
            partial state dicts inside of ``obj`` are merged over the MP group first, which is
            collective, and its first rank writes.
        v3: whether there is one file per rank, ``f_<pp_rank>_<tp_rank>_<rdp_rank>``.

    Raises:
        ValueError: the folder does not exist.
        PeerFailure, RuntimeError: parts are to be merged, and some ranks have not called this.
    """
    rank = runtime.current().rank
    path = Path(f)
    if partial:
        if not v3 and rank.ranks["cp"] > 0 and rank_files.has_cut(obj):
            return  # the rank of this file that has the merged state writes it
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

    def write(file: BinaryIO) -> None:
        torch.save(obj, file, pickle_module=pickle_module, pickle_protocol=pickle_protocol)
        file.flush()
        try:
            names = data_classes.names_in(file.name)
        except pickle.UnpicklingError:
            return  # load raises the same
        _saved_classes.update(cls for _, cls in data_classes.classes_of(names))

    file_generation.write_alone(path, write)


def load(
    f: str | os.PathLike[str],
    map_location: Any = None,
    pickle_module: Any = pickle,
    partial: bool = True,
    back_compat: bool = False,
    **pickle_load_args: Any,
) -> Any:
    """Loads a file that :func:`save` wrote; a full file may come from a run without smp.

    Args:
        f: path without the suffix of the rank.
        map_location: see ``torch.load``; the CPU by default.
        partial: whether to load this rank's file, whatever its suffix, or ``f`` itself. If files of
            another layout hold partial state dicts, each rank reads all of them and merges them.
        back_compat: accepted; no files of older libraries need it.
        pickle_load_args: arguments of ``torch.load``. Without ``weights_only`` it reads tensors,
            containers, configurations of transformers, Namespaces, plain values of numpy, and
            objects of classes that this process has saved with :func:`save`. Others need
            ``weights_only=False``, which runs code of the file: use it for your own files only.

    Raises:
        FileNotFoundError: no file fits; the text names the expected and the existing files.
        ValueError: the file holds other objects; the text names their classes.
    """
    pickle_load_args["map_location"] = "cpu" if map_location is None else map_location
    if pickle_load_args.get("weights_only") is False:
        pickle_load_args["pickle_module"] = pickle_module

    def load_file(path: Path, mmap: bool | None = None) -> Any:
        given_files.check_regular(path)
        options = pickle_load_args if mmap is None else {**pickle_load_args, "mmap": mmap}
        try:
            if options.get("weights_only") is not None or not zipfile.is_zipfile(path):
                return torch.load(path, **options)
            names = data_classes.names_in(path)
            reason = data_classes.refusal(names, _saved_classes)
            if reason is None:
                return data_classes.read(path, names, _saved_classes, **options)
        except (pickle.UnpicklingError, numpy_values.Unfit) as error:
            reason = f"objects other than tensors and plain containers ({error})"
        raise ValueError(
            f"{_C.rank_prefix()}{path} holds {reason}, which this process has not saved; if the "
            "file is your own, load it with weights_only=False"
        )

    if partial:
        return rank_files.load_any_layout(Path(f), load_file, runtime.current().rank)
    if not Path(f).exists():
        there = sorted(p.name for p in Path(f).parent.glob("*") if p.name.startswith(Path(f).name))
        raise FileNotFoundError(
            f"{_C.rank_prefix()}{f} does not exist; files with this prefix: {there or 'none'}. "
            "Load files of ranks with partial=True"
        )
    return load_file(Path(f))
