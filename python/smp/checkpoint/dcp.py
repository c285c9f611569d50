"""Writes a checkpoint in the form of torch.distributed.checkpoint, without a job.

FSDP2, torchtitan and others read such folders on any number of ranks. Names are those of a state
dict ``{"model": model.state_dict(), "optimizer": ...}``. The optimizer's state has both forms of
``torch.distributed.checkpoint.state_dict``: groups as a list, and options by parameter
(``flatten_optimizer_state_dict=True``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from smp.checkpoint import exporting
from smp.checkpoint.archive import Deferred
from smp.checkpoint.dcp_files import Writer
from smp.checkpoint.exporting import Translate
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.reader import FolderReader
from smp.checkpoint.values import decode

_OPTIMIZER = "optimizer/"
_CPU = torch.device("cpu")


class _Planner(DefaultSavePlanner):
    """A planner that makes each tensor when it is written.

    Args:
        made: tensors by their key in the flat state dict, where they are on the meta device.
    """

    def __init__(self, made: Mapping[str, Deferred]) -> None:
        super().__init__()
        self._made = made

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self._made.get(index.fqn)
        return super().lookup_object(index) if found is None else found.make().contiguous()


def export(
    source: Path,
    target: Path,
    dtype: torch.dtype | None = None,
    translate: Sequence[Translate] | None = None,
    with_optimizer: bool = True,
) -> list[Path]:
    """Writes model and optimizer of a checkpoint to the folder ``target``.

    Memory: one tensor, or the tensors of one layer if names are translated.

    Args:
        source: checkpoint folder.
        target: folder to write, which is new or empty.
        dtype: dtype of floating-point tensors of the model; None: as they were saved, and masters
            as FP32 if an optimizer is written.
        translate: translators, as in `exporting.export`.
        with_optimizer: write the optimizer's state, too, if there is one.

    Returns:
        all files.

    Raises:
        FileExistsError: the folder is not empty.
        ValueError: there is no model, a family is unknown, or names of the optimizer's parameters
            would have to be translated.
    """
    if target.is_dir() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty; give a new folder")
    with FolderReader(source) as reader:
        manifest = reader.manifest
        has_optimizer = with_optimizer and bool(manifest.values.get("groups"))
        chosen = exporting.translators_of(manifest) if translate is None else translate
        if has_optimizer and chosen:
            raise ValueError(
                f"{source} has the optimizer's state of layers that the library replaced, whose "
                "parameters are not those of the original model; leave it out (--without-optimizer)"
            )
        made = {
            f"model.{name}": tensor
            for name, tensor in exporting.tensors_of(
                reader, dtype, chosen, prefers_masters=has_optimizer, keeps_tied=True
            )
        }
        state: dict[str, Any] = {key: _empty(tensor) for key, tensor in made.items()}
        if has_optimizer:
            moments = _moments(reader)
            made |= moments
            state |= {key: _empty(tensor) for key, tensor in moments.items()} | _options(manifest)
        dcp.save(state, storage_writer=Writer(target), planner=_Planner(made), no_dist=True)
    return sorted(target.iterdir())


def _empty(tensor: Deferred) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _moments(reader: FolderReader) -> dict[str, Deferred]:
    """Returns the tensors of the optimizer's state by key."""
    found = {}
    for name, entry in reader.manifest.entries.items():
        if name.startswith(_OPTIMIZER):
            parameter, _, key = name.removeprefix(_OPTIMIZER).rpartition("/")

            def make(name: str = name) -> Tensor:
                return reader.read(name)

            dtype = getattr(torch, entry.dtype)
            found[f"optimizer.state.{parameter}.{key}"] = Deferred(entry.shape, dtype, make)
    return found


def _options(manifest: Manifest) -> dict[str, Any]:
    """Returns numbers of the optimizer's state, and options of its groups in both forms."""
    found: dict[str, Any] = {}
    for parameter, numbers in manifest.values.get("state", {}).items():
        for key, value in numbers.items():
            found[f"optimizer.state.{parameter}.{key}"] = decode(value, _CPU)
    for idx, group in enumerate(manifest.values["groups"]):
        options = {key: decode(value, _CPU) for key, value in group["options"].items()}
        for key, value in {**options, "params": group["names"]}.items():
            found[f"optimizer.param_groups.{idx}.{key}"] = value
        for name in group["names"]:
            for key, value in options.items():
                found[f"optimizer.param_groups.{name}.{key}"] = value
    return found
