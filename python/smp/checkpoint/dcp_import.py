"""Reads a folder of torch.distributed.checkpoint, and writes a checkpoint that any layout resumes.

Pickled files of the folder are read as data: they name classes of a list only.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from smp.checkpoint import archive, user_content
from smp.checkpoint import manifest as manifests
from smp.checkpoint.archive import Deferred
from smp.checkpoint.dcp import COMMON, FORMAT, MEGATRON, check_keys
from smp.checkpoint.dcp_files import MappedFolder
from smp.checkpoint.folder import Generation, new_generation
from smp.checkpoint.manifest import Block, Layout, Manifest, Piece, StoredEntry
from smp.checkpoint.partial_save import USER_CONTENT_FILE
from smp.checkpoint.resharding import FILE_OF_KIND
from smp.checkpoint.values import encode
from smp.config import given_files
from smp.tensor_parallel.parts import Part
from smp.world.run_record import versions

#: Names of what pickled metadata consists of, by module. Others, and attributes of these, may run
#: code.
_KNOWN = {
    "torch": {"Size", "strided", "contiguous_format", "preserve_format", "memory_format"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that refuses classes and functions which metadata does not consist of."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


@dataclass
class _Found:
    """The contents of a folder.

    Attributes:
        model: tensors of the model by name.
        moments: tensors of the optimizer's state, by the parameter's name and the key.
        numbers: other state of parameters, by the parameter's name and the key.
        groups: options and names of the optimizer's groups, encoded; empty without an optimizer.
        left: keys of what belongs to neither, and is not imported.
    """

    model: dict[str, Deferred] = field(default_factory=dict)
    moments: dict[tuple[str, str], Deferred] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def import_folder(
    source: Path, target: Path, model_key: str = "model", optimizer_key: str = "optimizer"
) -> tuple[Manifest, list[str]]:
    """Writes ``target``, a checkpoint folder from which a job of any layout resumes.

    Memory: one tensor.

    Args:
        source: folder of torch.distributed.checkpoint.
        target: folder to write.
        model_key: key of the model in the state dict that was saved; empty: its tensors have no key
            above them.
        optimizer_key: key of the optimizer there.

    Returns:
        the manifest of ``target``, and keys of the saved state dict that are not in it.

    Raises:
        FileExistsError: ``target`` exists.
        ValueError: there is no model below the key, the optimizer has no key of its own, or the
            metadata is no data.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists already; give a new folder")
    check_keys(model_key, optimizer_key)
    if not (source / ".metadata").is_file():
        raise ValueError(f"{source} has no file .metadata: it is no folder of this form")
    found = _Source(source).contents(model_key, optimizer_key)
    generation = Generation.begin(target.parent, target.name, new_generation())
    try:
        pieces = list(_pieces(found, generation.folder, generation.generation))
        manifest = Manifest.assemble(
            generation.generation, versions(), Layout({}, {"pp": 1}), pieces
        )
        generation.commit(manifest, name_newest=False)
    except BaseException:
        generation.abandon()
        raise
    return manifest, found.left


class _Source:
    """A folder of torch.distributed.checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            with open(folder / ".metadata", "rb") as file:
                metadata: Metadata = _Unpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError) as error:
            raise ValueError(f"{folder / '.metadata'} cannot be read as data: {error}") from None
        self._about: Mapping[str, Any] = metadata.state_dict_metadata
        self._paths = _nested_paths(metadata)
        self._mapped = MappedFolder(folder, metadata)
        self._common = _common_of(folder)

    def _load(self, key: str) -> Any:
        try:
            return self._mapped.read(key)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self._folder}: '{key}' cannot be read as data: {type(error).__name__}: {error}"
            ) from None

    def _path(self, name: str) -> list[str]:
        """Returns the keys by which the saved state dict had a value; empty: unknown."""
        return self._paths.get(name, [])

    def _is_below(self, name: str, key: str) -> bool:
        """Says whether the saved state dict had a value below a key, or, without one, in itself.

        Names are joined keys, which does not tell the two apart: models of transformers have
        parameters of the name ``model.embed_tokens.weight``.
        """
        path = self._path(name)
        if not path:
            return name.startswith(f"{key}.") or not key
        if not key:
            return len(path) == 1
        return any(".".join(path[:length]) == key for length in range(1, len(path)))

    def _below(self, *keys: str) -> Iterator[tuple[str, str]]:
        """Yields the names of values below the first key, and their rests behind all keys."""
        prefix = "".join(f"{key}." for key in keys if key)
        for name in self._about:
            if self._is_below(name, keys[0]) and name.startswith(prefix):
                yield name, name.removeprefix(prefix)

    def _title(self, name: str, model_key: str) -> str:
        """Returns a value's key for a message: the first one, or all keys of the model's values."""
        path = self._path(name)
        return path[0] if path and path[0] != model_key else name

    def _deferred(self, key: str) -> Deferred | None:
        about = self._about[key]
        if not isinstance(about, TensorStorageMetadata):
            return None
        make = functools.partial(self._load, key)
        return Deferred(tuple(about.size), about.properties.dtype, make)

    def contents(self, model_key: str, optimizer_key: str) -> _Found:
        found, read = _Found(), {key for key, _ in self._below(optimizer_key)}
        for key, name in self._below(model_key):
            tensor = self._deferred(key)
            if tensor is not None and key not in read:
                found.model[name] = tensor
                read.add(key)
        if not found.model:
            known = ", ".join(list(self._about)[:3])
            raise ValueError(
                f"{self._folder} has no tensors below the key '{model_key}'; it has {known} "
                'and others: name the key of the model (--model-key; --model-key "" if it has '
                "none, as in folders of torchtitan)"
            )
        for key, rest in self._below(optimizer_key, "state"):
            name, _, part = rest.rpartition(".")
            tensor = self._deferred(key)
            like = found.model.get(name)
            is_like = tensor is not None and like is not None and tensor.shape == like.shape
            if tensor is not None and ((is_like and part != "step") or tensor.shape):
                found.moments[name, part] = tensor
            else:
                where = f"'{part}' of the optimizer's state of '{name}'"
                found.numbers.setdefault(name, {})[part] = encode(self._load(key), where)
        found.left = sorted({self._title(key, model_key) for key in self._about.keys() - read})
        found.groups = self._groups(optimizer_key, found.model)
        optimizer = self._common.get(optimizer_key)
        if isinstance(optimizer, Mapping) and {"state", "param_groups"} <= optimizer.keys():
            self._take(optimizer, found)
        return found

    def _take(self, optimizer: Mapping[str, Any], found: _Found) -> None:
        """Takes the values of an optimizer that are no tensors."""
        for name, numbers in optimizer["state"].items():
            for key, value in numbers.items():
                where = f"'{key}' of the optimizer's state of '{name}'"
                found.numbers.setdefault(name, {})[key] = encode(value, where)
        for group in optimizer["param_groups"]:
            options = {
                name: encode(value, f"'{name}' of a parameter group")
                for name, value in group.items()
                if name != "params"
            }
            found.groups.append({"options": options, "names": list(group["params"])})

    def _groups(self, optimizer_key: str, model: Mapping[str, Deferred]) -> list[dict[str, Any]]:
        """Returns the optimizer's groups; parameters of equal options are one group."""
        options: dict[str, dict[str, Any]] = {}
        for key, rest in self._below(optimizer_key, "param_groups"):
            owner, _, option = rest.rpartition(".")
            options.setdefault(owner, {})[option] = self._load(key)
        listed = [group for owner, group in options.items() if owner.isdecimal()]
        if listed:
            named = [(group.pop("params"), group) for group in listed]
        else:
            named = [([name], group) for name, group in options.items()]
        result: list[dict[str, Any]] = []
        for names, group in named:
            encoded = {
                name: encode(value, f"'{name}' of a parameter group")
                for name, value in group.items()
                if name != "param_names"
            }
            same = next((one for one in result if one["options"] == encoded), None)
            if same is not None and not listed:
                same["names"] += names
            else:
                result.append({"options": encoded, "names": list(names)})
        return result


def _nested_paths(metadata: Metadata) -> dict[str, list[str]]:
    """Returns the keys by which the saved state dict had its values, by name.

    They are unknown if the writer had joined the keys itself, as Megatron-Core does: all are alone
    then.
    """
    known: Mapping[str, Sequence[Any]] = metadata.planner_data or {}
    paths = {name: [str(key) for key in path] for name, path in known.items()}
    return paths if any(len(path) > 1 for path in paths.values()) else {}


def _common_of(folder: Path) -> Mapping[str, Any]:
    """Returns the values that Megatron-Core writes beside the tensors; none in other folders.

    Raises:
        ValueError: the format is another, or the values are no data.
    """
    if not (folder / MEGATRON).is_file():
        return {}
    told = given_files.parse_json((folder / MEGATRON).read_bytes())
    if not isinstance(told, Mapping) or told.get("sharded_backend") != FORMAT["sharded_backend"]:
        raise ValueError(f"{folder / MEGATRON} names {told}, and {FORMAT} is expected")
    common = user_content.read(folder / COMMON, unsafe=False)
    return common if isinstance(common, Mapping) else {}


def _pieces(found: _Found, folder: Path, generation: str) -> Iterator[Piece]:
    kinds: dict[str, dict[str, Deferred]] = {"model": found.model}
    if found.moments:
        kinds["optimizer"] = {f"{name}/{key}": x for (name, key), x in found.moments.items()}
    for kind, tensors in kinds.items():
        file = f"{FILE_OF_KIND[kind]}_0.pt"
        written = archive.write(folder / file, tensors)
        piece = Piece(files={file: written.record})
        for (name, tensor), place in zip(tensors.items(), written.places, strict=True):
            dtype = str(tensor.dtype).removeprefix("torch.")
            block = Block(file, place.offset, Part.whole(tensor.shape))
            piece.entries[f"{kind}/{name}"] = StoredEntry(dtype, tensor.shape, [block])
        yield piece
    user_content.write(folder / USER_CONTENT_FILE, {}, generation)
    piece = Piece(files={USER_CONTENT_FILE: manifests.record_of(folder / USER_CONTENT_FILE)})
    piece.values = {
        "user_content": {"added": [], "is_none": True},
        "aliases": {},
        "has": {"model": True, "optimizer": bool(found.groups)},
        "steps": {"done": 0, "begun": 0},
        "seed": 0,
        "dropout_seed": None,
        "registrations": [],
    }
    if found.groups:
        piece.values |= {"groups": found.groups, "state": found.numbers}
    yield piece
