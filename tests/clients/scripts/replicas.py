"""A script for the data-parallel library of the service, by its old interface or its backend.

Every rank has the same number of samples of one batch; parameters are those of one process then.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4 * 6 * 6, 10)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.flatten(F.relu(self.conv(x)), 1))
        return result


def start(interface: str) -> tuple[Any, Any]:
    """Returns the module that the script calls `dist`, and its DistributedDataParallel."""
    if interface == "old":
        import smdistributed.dataparallel.torch.distributed as dist
        from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

        assert dist.is_available() and not dist.is_initialized()
        dist.init_process_group()
        assert dist.is_initialized() and 0 <= dist.get_local_rank() < dist.get_world_size()
        return dist, DistributedDataParallel
    import torch.distributed

    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    torch.distributed.init_process_group(backend="smddp")
    assert torch.distributed.get_backend() == "smddp"
    return torch.distributed, nn.parallel.DistributedDataParallel


def train(model: Any, loader: Any, accumulate: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for index, (data, target) in enumerate(loader):
        loss = F.cross_entropy(model(data), target)
        if accumulate and index % 2 == 0:
            with model.no_sync():
                F.cross_entropy(model(data), target).backward()
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--interface", choices=("old", "backend"), default="old")
    parser.add_argument("--accumulate", type=int, default=0)
    args = parser.parse_args()
    dist, wrap = start(args.interface)
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(48, 1, 8, 8, generator=generator, dtype=torch.float64)
    dataset = TensorDataset(images, torch.randint(0, 10, (48,), generator=generator))
    sampler = DistributedSampler(dataset, num_replicas=size, rank=rank, shuffle=False)
    torch.manual_seed(rank)  # the parameters of rank 0 count
    model = wrap(Net().double(), broadcast_buffers=False)
    train(model, DataLoader(dataset, BATCH // size, sampler=sampler), bool(args.accumulate))
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    gathered = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(gathered, torch.tensor([float(rank)]))
    dist.broadcast(shared := torch.tensor([float(rank + 5)]), 0)
    dist.barrier()
    result = {
        "parameters": {name: p.flatten().tolist() for name, p in model.module.named_parameters()},
        "total": total.item(),
        "gathered": [one.item() for one in gathered],
        "shared": shared.item(),
        "rank": rank,
    }
    folder = Path(os.environ["SM_CHANNEL_TRAIN"])
    (folder / f"result_{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
