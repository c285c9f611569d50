"""Writes the model of a checkpoint folder as Hugging Face's safetensors, without a job."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint import huggingface, safetensors_stream
from smp.checkpoint import manifest as manifests
from smp.checkpoint.archive import Deferred
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.reader import FolderReader
from smp.nn.huggingface import installed
from smp.nn.huggingface.register import FAMILIES

State = dict[str, torch.Tensor]
Translate = Callable[..., dict[str, Any]]

_MODEL, _MASTER = "model/", "master/"
_HEADS = frozenset((*installed.HEADS, "decoder"))
_LAYER = re.compile(r"(.*?\.\d+)\.")
# In a dry run, dtypes that no weight has show which group a result is made of.
_MINE, _OTHERS = torch.int8, torch.uint8


def export(
    source: Path,
    target: Path,
    max_shard_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
    translate: Sequence[Translate] | None = None,
) -> list[Path]:
    """Writes the model of a checkpoint to the folder ``target``, and its configuration if there is
    one.

    If only masters of a weight were saved, as with sharded data parallelism, they are rounded as
    the model was, unless ``dtype`` asks for more.

    Memory: one tensor, or the tensors of one layer if names are translated.

    Args:
        source: checkpoint folder.
        target: folder to write.
        max_shard_bytes: most bytes of tensors in a file; a single tensor may be larger.
        dtype: dtype of floating-point tensors; None: as they were saved.
        translate: translators from names of distributed modules to those of Hugging Face; None:
            translators of the families that the manifest names.

    Returns:
        all files.

    Raises:
        FileExistsError: the folder has safetensors files already.
        ValueError: there is no model, its weights are quantized, or a family is unknown.
    """
    if target.is_dir() and any(target.glob("*.safetensors*")):
        raise FileExistsError(f"{target} already has safetensors files; give another folder")
    with FolderReader(source) as reader:
        chosen = translators_of(reader.manifest) if translate is None else translate
        tensors = dict(tensors_of(reader, dtype, chosen))
        target.mkdir(parents=True, exist_ok=True)
        files = safetensors_stream.write_sharded(target, tensors, max_shard_bytes)
        if huggingface.CONFIG in reader.manifest.files:
            record = reader.manifest.files[huggingface.CONFIG]
            manifests.check_file(source / huggingface.CONFIG, record)
            files.append(target / huggingface.CONFIG)
            shutil.copyfile(source / huggingface.CONFIG, files[-1])
        return files


def tensors_of(
    reader: FolderReader,
    dtype: torch.dtype | None,
    translate: Sequence[Translate],
    prefers_masters: bool = False,
    keeps_tied: bool = False,
) -> Iterator[tuple[str, Deferred]]:
    """Yields the tensors of a checkpoint's model, in the names of the original model.

    Args:
        reader: reader of the checkpoint.
        dtype: dtype of floating-point tensors; None: as they were saved.
        translate: translators from names of distributed modules.
        prefers_masters: take masters where they were saved, with all of their digits.
        keeps_tied: yield a tied tensor for each of its names, as a state dict has it.

    Raises:
        ValueError: no model was saved, or its weights are quantized.
    """
    weights = _weights_of(reader.manifest, dtype is None, prefers_masters)
    if not weights:
        raise ValueError(f"{reader.folder} has no entries {_MODEL}...: no model was saved")
    if reader.manifest.values.get("quantized"):
        raise ValueError(
            f"{reader.folder} lacks the quantized weights of its model, which checkpoints leave "
            "out; write adapters by smp.save_adapters, and merge them into the model in full "
            "precision"
        )
    found = dict(_Translation(reader, weights, translate, dtype).results(keeps_tied))
    yield from found.items()
    if keeps_tied:
        for alias, name in reader.manifest.values.get("aliases", {}).items():
            if alias not in found and name in found:
                yield alias, found[name]


@dataclass(frozen=True)
class _Weight:
    """The entry that has a tensor of the model, and the shape and dtype to write."""

    entry: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def _weights_of(manifest: Manifest, rounds: bool, prefers_masters: bool) -> dict[str, _Weight]:
    """Returns the tensors of the model by name; masters where only these were saved."""
    config = manifest.layout.config
    half = torch.float16 if config.get("fp16") else torch.bfloat16 if config.get("bf16") else None
    weights: dict[str, _Weight] = {}
    for prefix in (_MASTER, _MODEL) if prefers_masters else (_MODEL, _MASTER):
        for entry, stored in manifest.entries.items():
            name = entry.removeprefix(prefix)
            if name == entry or name in weights:
                continue
            dtype = getattr(torch, stored.dtype)
            if rounds and prefix == _MASTER and half is not None and not prefers_masters:
                dtype = half
            weights[name] = _Weight(entry, stored.shape, dtype)
    return weights


def translators_of(manifest: Manifest) -> list[Translate]:
    """Returns the translators from a checkpoint's names to those of Hugging Face.

    ``values["registrations"]`` lists, for each class that was replaced by a distributed one, the
    family and the name of the class: ``[["gpt2", "GPT2LMHeadModel"]]``.

    Raises:
        ValueError: no family of this release has a pair; the text names it.
    """
    pairs = manifest.values.get("registrations", [])
    return [translator(family, module_cls) for family, module_cls in pairs]


def translator(family: str, module_cls: str) -> Translate:
    """Returns the translator from distributed modules' names to a family's, for one class."""
    for known in FAMILIES:
        for kind, name in known.classes.items():
            if known.names.family == family and name == module_cls:
                return known.translators(kind)[0]
    raise ValueError(
        f"no translation for {module_cls} of the family {family}; there are "
        f"{', '.join(known.names.family for known in FAMILIES)}"
    )


class _Translation:
    """Translates group by group: a group is real, and the rest of the model without memory.

    Translators join and transpose within a layer only, so the tensors of one layer are a group,
    and those outside of layers are another.
    """

    def __init__(
        self,
        reader: FolderReader,
        weights: Mapping[str, _Weight],
        translate: Sequence[Translate],
        dtype: torch.dtype | None,
    ) -> None:
        self._reader, self._weights = reader, weights
        self._translate, self._dtype = translate, dtype
        self._made: tuple[str, State] = ("", {})
        # Without translation each tensor is a group.
        self._group = _group_of_layer if translate else _itself

    def results(self, keeps_tied: bool) -> Iterator[tuple[str, Deferred]]:
        whole = self._run(self._meta)
        for name in () if keeps_tied else second_names(whole):
            del whole[name]
        for group in dict.fromkeys(self._group(name) for name in self._weights):
            for name in self._results_of(group):
                if name in whole:
                    yield name, self._deferred(whole[name], partial(self._made_in, group, name))
        for name, extra in whole.items():
            if not extra.is_meta:  # buffers that follow from sizes
                yield name, self._deferred(extra, partial(_itself, extra))

    def _deferred(self, like: torch.Tensor, make: Callable[[], torch.Tensor]) -> Deferred:
        if self._dtype is None or not like.is_floating_point():
            return Deferred(tuple(like.shape), like.dtype, make)
        return Deferred(tuple(like.shape), self._dtype, lambda: make().to(self._dtype))

    def _run(self, make: Callable[[str], torch.Tensor]) -> State:
        state: dict[str, Any] = {name: make(name) for name in self._weights}
        for translate in self._translate:
            state = translate(state)
        return state

    def _results_of(self, group: str) -> list[str]:
        """Returns names of results that are made of the tensors of a group."""

        def make(name: str) -> torch.Tensor:
            dtype = _MINE if self._group(name) == group else _OTHERS
            return torch.empty(self._weights[name].shape, dtype=dtype, device="meta")

        results = self._run(make)
        return [name for name, t in results.items() if t.is_meta and t.dtype == _MINE]

    def _made_in(self, group: str, name: str) -> torch.Tensor:
        """Makes a result of the tensors of a group; keeps its other results for later calls."""
        if self._made[0] != group or name not in self._made[1]:
            self._made = ("", {})  # frees before it allocates
            wanted = set(self._results_of(group))
            results = self._run(
                lambda n: self._real(n) if self._group(n) == group else self._meta(n)
            )
            self._made = (group, {n: t for n, t in results.items() if n in wanted})
        return self._made[1].pop(name)

    def _real(self, name: str) -> torch.Tensor:
        weight = self._weights[name]
        return self._reader.read(weight.entry).to(weight.dtype)

    def _meta(self, name: str) -> torch.Tensor:
        weight = self._weights[name]
        return torch.empty(weight.shape, dtype=weight.dtype, device="meta")


def _group_of_layer(name: str) -> str:
    match = _LAYER.match(name)
    return match[1] if match else ""


def second_names(state: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns heads that are the embedding's own table: files of Hugging Face leave them out."""
    first: dict[int, str] = {}
    for name, tensor in sorted(state.items(), key=lambda item: _is_head(item[0])):
        first.setdefault(id(tensor), name)
    return [name for name, tensor in state.items() if first[id(tensor)] != name]


def _is_head(name: str) -> bool:
    return any(module in _HEADS for module in name.split("."))


def _itself(value: Any) -> Any:
    return value


def parse_bytes(text: str) -> int:
    """Parses a number of bytes: ``"5GB"``, ``"512MB"``, ``"1000"``.

    Raises:
        ValueError: the text is no size.
    """
    match = re.fullmatch(r"(\d+)\s*(K|M|G|T|)B?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size; write 5GB or 500MB")
    thousands: int = 1000 ** ("", "K", "M", "G", "T").index(match[2].upper())
    return int(match[1]) * thousands
