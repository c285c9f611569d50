"""Reads files of whole models: PyTorch's and safetensors, single and sharded with an index, under
the names of Hugging Face. Tensors are mapped, so that only those in use are read."""

from __future__ import annotations

import math
import mmap
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp.checkpoint import file_system, safetensors_stream
from smp.checkpoint import folder as folders
from smp.config import given_files

SAFETENSORS = ".safetensors"
INDEX = ".index.json"
CONFIG = "config.json"
#: Hugging Face's names of weights, best first.
NAMES = ("pytorch_model.bin", "model.safetensors")

# An upper bound: no tensor, even an empty one, could have more.
_MOST_ELEMENTS = 2**60
_DTYPES = {name: dtype for dtype, name in safetensors_stream.NAMES.items()}
_PLAIN_NAME = re.compile(r"[^/\\\0]+\Z")


class Weights(dict[str, Any]):
    """A state dict whose tensors may be mapped from files.

    Attributes:
        mappings: the files, private and never written to.
    """

    def __init__(self, state: Mapping[str, Any], mappings: Sequence[mmap.mmap] = ()) -> None:
        super().__init__(state)
        self.mappings = list(mappings)

    def drop_pages(self) -> None:
        """Takes the pages that were read out of this process; the next read finds them again."""
        for mapping in self.mappings:
            mapping.madvise(mmap.MADV_DONTNEED)


def find_weights(path: Path, tag: str | None) -> Path:
    """Returns the file, or index, with a whole model.

    Args:
        path: folder.
        tag: name of a file or folder in it; None: the whole model that the file ``newest`` names;
            if it names none, the folder is one of Hugging Face. Newer files are accepted in the
            place of Hugging Face's older ones.

    Raises:
        FileNotFoundError: no file fits; the text names the expected and the existing files.
    """
    newest = folders.newest_whole(path) if tag is None else None
    if newest is not None:
        return newest
    folder, wanted = path, list(NAMES)
    if tag is not None and (path / tag).is_dir():
        folder = path / tag
    elif tag is not None:
        wanted = [tag] if tag not in NAMES else [tag, *(name for name in NAMES if name != tag)]
    candidates = [name + end for name in wanted for end in ("", INDEX)]
    for name in candidates:
        if (folder / name).is_file():
            return folder / name
    there = sorted(item.name for item in folder.iterdir()) if folder.is_dir() else []
    raise FileNotFoundError(
        f"{_C.rank_prefix()}{folder} has none of {candidates}; there are: "
        f"{', '.join(there) or 'no files'}"
        + (". Give the name of another file as tag=" if tag is None else "")
    )


def open_weights(path: Path) -> Weights:
    """Returns the state dict in a file, or in the files of an index; tensors are on the CPU.

    Raises:
        ValueError: the file is malformed, or holds objects that are not loaded as data.
    """
    try:
        given_files.check_regular(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{_C.rank_prefix()}{path} cannot be read: {error.strerror}") from None
    if path.name.endswith(INDEX):
        return _open_index(path)
    if _is_safetensors(path):
        return read_safetensors(path)
    return Weights(_open_torch(path))


class WeightFiles:
    """The tensors of a whole model in files, of which one is read at a time.

    Args:
        path: folder as in :func:`find_weights`, or a file.

    Raises:
        FileNotFoundError: the folder has no file with weights.
        ValueError: a file is malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path if path.is_file() else find_weights(path, None)
        files = {self.path}
        if self.path.name.endswith(INDEX):
            files = {self.path.with_name(name) for name in _weight_map(self.path).values()}
        self._files = {name: file for file in sorted(files) for name in open_weights(file)}

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __len__(self) -> int:
        return len(self._files)

    def read(self, name: str) -> Tensor:
        """Returns a tensor, mapped if the file allows it. Nothing else stays open."""
        value = open_weights(self._files[name])[name]
        assert isinstance(value, Tensor)
        return value


def _weight_map(path: Path) -> dict[str, str]:
    """Returns the files by name of the tensor, as an index has them.

    Raises:
        ValueError: the index is malformed, or names files elsewhere.
    """
    try:
        weight_map = given_files.parse_json(path.read_bytes())["weight_map"]
        if not all(
            isinstance(name, str) and _PLAIN_NAME.match(name) for name in weight_map.values()
        ):
            raise ValueError("weight_map names files that are not in this folder")
        if any(name.endswith(INDEX) for name in weight_map.values()):
            raise ValueError("weight_map names another index")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{_C.rank_prefix()}{path} is not an index of weights: {error}") from None
    return dict(weight_map)


def _open_index(path: Path) -> Weights:
    weight_map = _weight_map(path)
    state = Weights({})
    for name in sorted(set(weight_map.values())):
        held = open_weights(path.with_name(name))
        state.update({key: value for key, value in held.items() if weight_map.get(key) == name})
        state.mappings += held.mappings
    missing = sorted(set(weight_map) - set(state))
    if missing:
        raise ValueError(
            f"{_C.rank_prefix()}{path} names {len(missing)} tensors, '{missing[0]}' among them, "
            "that are not in the files that it lists for them"
        )
    return state


def _open_torch(path: Path) -> dict[str, Any]:
    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{_C.rank_prefix()}{path} holds objects other than tensors ({error}), and loading "
            "these can run code; save the state_dict() of the model alone"
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise ValueError(
            f"{_C.rank_prefix()}{path} holds a {type(state).__name__}, not the state dict of a "
            "model"
        )
    return dict(state)


# ---- safetensors ---------------------------------------------------------------------


def _is_safetensors(path: Path) -> bool:
    if path.name.endswith(SAFETENSORS):
        return True
    with open(path, "rb") as file:
        return file.read(9)[8:] == b"{"


def read_safetensors(path: Path) -> Weights:
    """Returns the tensors of a file, mapped.

    Raises:
        ValueError: the file is malformed.

    Source: the format as documented by Hugging Face: 8 bytes with the size of the header, the
    header in JSON, the data.
    """
    try:
        with open(path, "rb") as file:
            # A private mapping: torch needs writable memory, and no other process sees writes.
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        size = int.from_bytes(memory[:8], "little")
        if 8 + size > len(memory):
            raise ValueError(f"a header of {size} bytes in a file of {len(memory)}")
        header = given_files.parse_json(memory[8 : 8 + size])
        header.pop("__metadata__", None)
        state = {name: _mapped(memory, 8 + size, info) for name, info in header.items()}
        return Weights(state, [memory])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{_C.rank_prefix()}{path} is not a safetensors file: {error}") from None


def _mapped(memory: mmap.mmap, start: int, info: dict[str, Any]) -> Tensor:
    dtype, shape = _DTYPES[info["dtype"]], list(info["shape"])
    begin, end = info["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"sizes {shape} in bytes [{begin}, {end})")
    if math.prod(max(size, 1) for size in shape) > _MOST_ELEMENTS:
        raise ValueError(f"sizes {shape}")
    numel = math.prod(shape)
    if not 0 <= begin <= end <= len(memory) - start or end - begin != numel * dtype.itemsize:
        raise ValueError(f"bytes [{begin}, {end}) for {info['dtype']} {shape}")
    if numel == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=start + begin).view(shape)


def write_config(path: Path, tag: str, module: torch.nn.Module, unique: str) -> None:
    """Writes a model's configuration beside weights for Hugging Face, in one step.

    An existing configuration stays, and models without one get none.

    Args:
        path: folder.
        tag: name of the weights; others than Hugging Face's get no configuration.
        module: the model.
        unique: name of this writer.
    """
    text = config_of(module) if tag in NAMES and not (path / CONFIG).exists() else None
    if text is not None:
        file_system.write_file(path / CONFIG, text.encode(), unique)


def config_of(module: torch.nn.Module) -> str | None:
    """Returns the configuration of a model of transformers, in JSON; None for other models."""
    config: Any = getattr(module, "config", None)
    return config.to_json_string() if hasattr(config, "to_json_string") else None
