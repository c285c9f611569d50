"""Megatron-Core loads or saves a distributed checkpoint, in one process without a GPU.

Usage: megatron_folder.py load|save FOLDER FILE. FILE has, in PyTorch's form, tensors by their keys:
with "load", those that the folder has are written there; with "save", they are written to the
folder, beside what is below "common".
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

# The package asks CUDA for the place of its small tensors, and waits for it.
torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402


def main() -> None:
    how, folder, file = sys.argv[1:]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    given = torch.load(file, weights_only=True)
    common = given.pop("common", {})
    state = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in given.items()}
    if how == "save":
        dist_checkpointing.save({**state, **common}, folder)
    else:
        torch.save(dist_checkpointing.load(state, folder), file)


if __name__ == "__main__":  # saving starts a process that imports this file
    main()
