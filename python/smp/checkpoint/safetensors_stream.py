"""Writes safetensors files tensor by tensor; the format's library holds whole files in memory.

Format: 8 bytes with the length of the header, the header in JSON, the tensors.
Source: the format description of the safetensors project, version 0.4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from smp.checkpoint import file_system, shards
from smp.checkpoint.archive import DEFAULTS, Deferred, WriteOptions, Writing
from smp.checkpoint.manifest import FileRecord

NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_ALIGNMENT = 8


def write(
    path: Path, tensors: Mapping[str, Deferred], options: WriteOptions = DEFAULTS
) -> FileRecord:
    """Writes and synchronises one file; each tensor is made at its turn.

    Raises:
        ValueError: a tensor has a dtype that the format has not, or differs from its announcement;
            the text names the tensor.
        RuntimeError: the file cannot be written; the text names it.
    """
    # Large elements first, so that each tensor is aligned to its elements.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    with Writing(path, options) as writing:
        writing.writer.append(_header(tensors))
        for tensor in tensors.values():
            for piece in tensor.pieces():
                writing.writer.append_tensor(piece)
    return writing.record


def write_sharded(
    folder: Path, tensors: Mapping[str, Deferred], max_shard_bytes: int
) -> list[Path]:
    """Writes ``model.safetensors``, or shards and their index as Hugging Face names them.

    A shard holds as many tensors, in their order, as fit. A tensor larger than that has a shard of
    its own.

    Returns:
        all files.
    """
    sizes = {name: tensor.num_bytes for name, tensor in tensors.items()}
    cut = shards.cut(sizes, max_shard_bytes)
    paths = [folder / name for name in shards.file_names(len(cut))]
    for path, names in zip(paths, cut, strict=True):
        write(path, {name: tensors[name] for name in names})
    if len(cut) == 1:
        return paths
    index = folder / shards.INDEX_NAME
    file_system.write_file(index, shards.index_of(cut, sizes), "index")
    return [*paths, index]


def _header(tensors: Mapping[str, Deferred]) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise ValueError(f"safetensors has no {tensor.dtype}, which {name} is")
        end = begin + tensor.num_bytes
        fields[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
