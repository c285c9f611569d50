"""Conversion of a sharded partial checkpoint to a whole model, in one process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smp.checkpoint import folder as folders
from smp.tensor_parallel.cutting import join
from smp.tensor_parallel.parts import Part


def get_full_state_dict_from_sharded_data_parallel_checkpoint(
    checkpoint_dir: str | os.PathLike[str], tag: str | None = None, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Merges the files of ``save_checkpoint(partial=True)`` with sharded data parallelism.

    No process group, GPU or `smp.init` is needed. Parameters come from the float32 masters in the
    files of the optimizer, buffers from the file of the model. Files are read with
    ``weights_only=True`` and mapped into memory, so that the whole model is in memory once. Objects
    of the user's classes are skipped, and no code of theirs runs.

    Args:
        checkpoint_dir: folder that `save_checkpoint` got.
        tag: tag of the checkpoint, with or without its suffix ``_partial``; by default the tag in
            the file ``newest``, or the newest partial checkpoint if that is a whole model.
        dtype: dtype of parameters in the result; by default float32, as they were saved.

    Returns:
        Buffers and whole parameters by name, as the plain model's state dict has them.

    Raises:
        FileNotFoundError: a file does not exist; the text names it.
        ValueError: the content of a file does not fit; the text names the file.
    """
    folder = _folder(Path(checkpoint_dir), tag)
    content = _read_beside_objects(folder / "user_content.pt")
    model = _entry(_read(folder / "model_0.pt"), "module", folder / "model_0.pt")
    names = _entry(content, "buffer_names", folder / "user_content.pt")
    shapes = _entry(content, "param_shapes", folder / "user_content.pt")
    groups = _flat_groups(folder)
    if len(groups) != len(shapes):
        raise ValueError(
            f"{folder}: user_content.pt has param_shapes of {len(shapes)} groups, the files of "
            f"the optimizer have {len(groups)}"
        )
    missing = [name for name in names if name not in model]
    if missing:
        raise ValueError(f"{folder / 'model_0.pt'}: the buffers {missing} are not in 'module'")
    result: dict[str, Any] = {name: model[name].clone() for name in names}
    for index, (group_shapes, shards) in enumerate(zip(shapes, groups, strict=True)):
        result.update(_join_group(group_shapes, shards, dtype, f"{folder}: group {index}"))
    return result


def _folder(path: Path, tag: str | None) -> Path:
    if tag is None:
        try:
            tag = folders.newest(path)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}; give the tag of the checkpoint") from None
        if (path / tag).is_file():
            partial = folders.partial_checkpoints(path)
            if not partial:
                raise FileNotFoundError(
                    f"{path / folders.NEWEST} names '{tag}', a whole model, and {path} has no "
                    "complete partial checkpoint of ours; give the tag of the checkpoint, or load "
                    "the whole model"
                )
            return partial[-1]
    for name in (tag, f"{tag}_partial"):
        if (path / name).is_dir():
            return path / name
    raise FileNotFoundError(f"neither {path / tag} nor {path / tag}_partial is a folder")


class _PassedOver:
    """A substitute for an object of a class that is not needed."""

    def __new__(cls, *_: Any, **__: Any) -> _PassedOver:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


def _read_beside_objects(path: Path) -> Any:
    """Returns the content of a file in which users may have put objects of any class."""
    _require(path)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    stand_ins: list[Any] = [(type("_PassedOver", (_PassedOver,), {}), name) for name in names]
    with torch.serialization.safe_globals(stand_ins):
        return _read(path)


def _read(path: Path) -> Any:
    _require(path)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _require(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; partial checkpoints of sharded data parallelism have it"
        )


def _entry(content: Any, key: str, path: Path) -> Any:
    if not isinstance(content, Mapping) or key not in content:
        raise ValueError(
            f"{path} has no '{key}'; was it saved without sharded data parallelism? Then load the "
            "file of a full checkpoint"
        )
    return content[key]


def _flat_groups(folder: Path) -> list[list[Tensor]]:
    """Returns the flat tensors of all shards, by group."""
    first = folder / "optimizer_0.pt"
    count = _entry(_read(first), "partition_count", first)
    num_shards = max(count) if isinstance(count, list | tuple) else int(count)
    shards: list[Sequence[Tensor]] = []
    for index in range(num_shards):
        path = folder / f"optimizer_{index}.pt"
        flats = _entry(_read(path), "fp32_flat_groups", path)
        if shards and len(flats) != len(shards[0]):
            raise ValueError(f"{path} has {len(flats)} groups, {first} has {len(shards[0])}")
        shards.append(flats)
    return [list(group) for group in zip(*shards, strict=True)]


def _join_group(
    shapes: Mapping[str, Sequence[int]],
    shards: Sequence[Tensor],
    dtype: torch.dtype | None,
    where: str,
) -> dict[str, Tensor]:
    """Joins the parameters of one group; each takes ``ceil(numel / shards)`` elements per shard."""
    joined: dict[str, Tensor] = {}
    begin = 0
    available = min(shard.numel() for shard in shards)
    for name, given in shapes.items():
        shape = torch.Size(given)
        end = begin - (-shape.numel() // len(shards))
        if end > available:
            raise ValueError(
                f"{where}: '{name}' of shape {tuple(shape)} ends at element {end} of a shard, "
                f"which has {available}"
            )
        parts = [Part.share(shape, idx, len(shards)) for idx in range(len(shards))]
        held = [shard[begin : begin + p.flat_numel] for shard, p in zip(shards, parts, strict=True)]
        whole = join(list(zip(held, parts, strict=True)), shape)
        joined[name] = whole if dtype is None else whole.to(dtype)
        begin = end
    return joined
