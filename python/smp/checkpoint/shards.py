"""Decides which tensors of a model are in which file of Hugging Face, and which rank writes it.

Pure, and equal on all ranks that ask with the same arguments.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

INDEX_NAME = "model.safetensors.index.json"


def cut(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Returns the names of each shard: as many tensors, in their order, as fit.

    A tensor larger than a shard has one of its own.

    Args:
        sizes: bytes of each tensor.
        max_shard_bytes: most bytes of a shard.
    """
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def file_names(num_shards: int) -> list[str]:
    """Returns the names of the files, as transformers has them."""
    if num_shards == 1:
        return ["model.safetensors"]
    last = f"-of-{num_shards:05d}.safetensors"
    return [f"model-{idx:05d}{last}" for idx in range(1, num_shards + 1)]


def index_of(shards: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> bytes:
    """Returns the index of several files."""
    files = zip(file_names(len(shards)), shards, strict=True)
    weight_map = {name: file for file, names in files for name in names}
    index = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(index, indent=2) + "\n").encode()


def choose_writers(
    shards: Sequence[Sequence[str]],
    sizes: Mapping[str, int],
    owned: Mapping[str, Mapping[int, int]],
) -> list[int]:
    """Returns the rank that writes each shard, an owner of most of its bytes.

    Of several such owners, as replicas are, the rank with the fewest bytes to write so far is
    chosen.

    Args:
        shards: names of the tensors in each shard.
        sizes: bytes of each tensor.
        owned: bytes of each tensor that ranks have, by rank.
    """
    loads: Counter[int] = Counter()
    writers = []
    for names in shards:
        here: Counter[int] = Counter()
        for name in names:
            here.update(owned[name])
        most = max(here.values(), default=0)
        best = [rank for rank, num_bytes in here.items() if num_bytes == most] or [0]
        writer = min(best, key=lambda rank: (loads[rank], rank))
        loads[writer] += sum(sizes[name] for name in names)
        writers.append(writer)
    return writers


def interleaved(
    shards: Sequence[Sequence[str]], writers: Sequence[int], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Returns the writer of each tensor, in an order in which all writers are busy at all times.

    A writer's tensors are in the order of its files.
    """
    behind: Counter[int] = Counter()
    places: list[tuple[int, int, str]] = []
    for names, writer in zip(shards, writers, strict=True):
        for name in names:
            places.append((behind[writer], writer, name))
            behind[writer] += max(1, sizes[name])
    return {name: writer for _, writer, name in sorted(places)}
