"""Writes a checkpoint in the form of torch.distributed.checkpoint, without a job.

FSDP2, torchtitan and others read such folders on any number of ranks. Names are those of a state
dict ``{"model": model.state_dict(), "optimizer": ...}``, or of torchtitan's, in which the model's
tensors have no key above them. The optimizer's state has both forms of
``torch.distributed.checkpoint.state_dict``: groups as a list, and options by parameter
(``flatten_optimizer_state_dict=True``).

The distributed checkpoints of Megatron-Core are such folders with two more files: ``metadata.json``
names the format, and ``common.pt`` has all values that are no tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from smp.checkpoint import exporting, file_system
from smp.checkpoint.archive import Deferred
from smp.checkpoint.dcp_files import Writer
from smp.checkpoint.exporting import Translate
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.reader import FolderReader
from smp.checkpoint.values import decode

COMMON, MEGATRON = "common.pt", "metadata.json"
#: Contents of `MEGATRON`: the only format that is written and read.
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_MOMENTS = "optimizer/"
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
    is_megatron: bool = False,
    model_key: str = "model",
    optimizer_key: str = "optimizer",
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
        is_megatron: write the files of Megatron-Core, too, and values that are no tensors there.
        model_key: key of the model in the state dict; empty: its tensors have no key above them.
        optimizer_key: key of the optimizer there.

    Returns:
        all files.

    Raises:
        FileExistsError: the folder is not empty.
        ValueError: there is no model, a family is unknown, or names of the optimizer's parameters
            would have to be translated; or the optimizer has no key, or that of the model.
    """
    if target.is_dir() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty; give a new folder")
    check_keys(model_key, optimizer_key)
    with FolderReader(source) as reader:
        manifest = reader.manifest
        has_optimizer = with_optimizer and bool(manifest.values.get("groups"))
        chosen = exporting.translators_of(manifest) if translate is None else translate
        if has_optimizer and chosen:
            raise ValueError(
                f"{source} has the optimizer's state of layers that the library replaced, whose "
                "parameters are not those of the original model; leave it out (--without-optimizer)"
            )
        model = dict(
            exporting.tensors_of(
                reader, dtype, chosen, prefers_masters=has_optimizer, keeps_tied=True
            )
        )
        moments = _moments(reader) if has_optimizer else {}
        state = {model_key: _empty(model)} if model_key else _empty(model)
        if has_optimizer:
            options = {} if is_megatron else _options(manifest)
            state |= {optimizer_key: _empty(moments) | options}
        made = {f"{model_key}.{name}".removeprefix("."): value for name, value in model.items()}
        made |= {f"{optimizer_key}.{name}": value for name, value in moments.items()}
        dcp.save(state, storage_writer=Writer(target), planner=_Planner(made), no_dist=True)
        if is_megatron:
            _write_common(target, {optimizer_key: _optimizer(manifest)} if has_optimizer else {})
    return sorted(target.iterdir())


def check_keys(model_key: str, optimizer_key: str) -> None:
    """Raises ValueError if the optimizer has no key in the state dict, or that of the model."""
    if optimizer_key in ("", model_key):
        raise ValueError(f"the optimizer's key is {optimizer_key!r}; give it one of its own")


def _empty(made: Mapping[str, Deferred]) -> dict[str, Any]:
    """Returns tensors without memory in place of those that are made later."""
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in made.items()
    }


def _moments(reader: FolderReader) -> dict[str, Deferred]:
    """Returns the tensors of the optimizer's state by key."""
    found = {}
    for name, entry in reader.manifest.entries.items():
        if name.startswith(_MOMENTS):
            parameter, _, key = name.removeprefix(_MOMENTS).rpartition("/")

            def make(name: str = name) -> Tensor:
                return reader.read(name)

            dtype = getattr(torch, entry.dtype)
            found[f"state.{parameter}.{key}"] = Deferred(entry.shape, dtype, make)
    return found


def _optimizer(manifest: Manifest) -> dict[str, Any]:
    """Returns numbers of the optimizer's state, and its groups, in the form of its state dict."""
    groups = [
        {"params": group["names"], **_decoded(group["options"])}
        for group in manifest.values["groups"]
    ]
    numbers = manifest.values.get("state", {})
    state = {name: _decoded(values) for name, values in numbers.items()}
    return {"state": state, "param_groups": groups}


def _decoded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: decode(value, _CPU) for key, value in values.items()}


def _write_common(folder: Path, common: Mapping[str, Any]) -> None:
    file_system.write_file(folder / COMMON, lambda file: torch.save(common, file), "common")
    file_system.write_file(folder / MEGATRON, json.dumps(FORMAT).encode(), "common")


def _options(manifest: Manifest) -> dict[str, Any]:
    """Returns numbers of the optimizer's state, and options of its groups in both forms.

    Groups without a schedule get ``initial_lr``, as if a schedule began now: readers with a
    schedule, such as torchtitan, ask for it.
    """
    found: dict[str, Any] = {}
    optimizer = _optimizer(manifest)
    for parameter, numbers in optimizer["state"].items():
        for key, value in numbers.items():
            found[f"state.{parameter}.{key}"] = value
    for idx, group in enumerate(optimizer["param_groups"]):
        started = {"initial_lr": group["lr"]} if "lr" in group else {}
        for key, value in {**started, **group}.items():
            found[f"param_groups.{idx}.{key}"] = value
            for name in group["params"] if key != "params" else ():
                found[f"param_groups.{name}.{key}"] = value
    return found
