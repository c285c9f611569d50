"""Client H: a data loader whose batches only the first pipeline rank reads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import smdistributed.modelparallel.torch as smp


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Random sequences of one group of ranks that share them."""

    def __init__(self, group: int, num_samples: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(1000 + group)
        self.ids = torch.randint(2, vocabulary, (num_samples, length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.ids[index], torch.ones_like(self.ids[index])


class DummyLoader:
    """Batches of no content, as many as the first pipeline rank has."""

    def __init__(self, length: int, batch_size: int, num_tensors: int = 2) -> None:
        self.length, self.batch_size, self.num_tensors = length, batch_size, num_tensors

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for _ in range(self.length):
            yield tuple(torch.empty(self.batch_size, 0) for _ in range(self.num_tensors))


def make_loader(
    batch_size: int, num_samples: int, length: int, vocabulary: int, prescaled: bool = False
) -> DataLoader[tuple[Tensor, Tensor]] | DummyLoader:
    """Batches of this rank; with a prescaled batch peers of tensor parallelism read the same."""
    if smp.pp_rank() == 0:
        group = smp.rdp_rank() if prescaled else smp.dp_rank()
        data = Tokens(group, num_samples, length, vocabulary)
        loader = DataLoader(data, batch_size=batch_size, drop_last=True)
        smp.broadcast(len(loader), smp.PP_GROUP)
        return loader
    return DummyLoader(smp.recv_from(0, smp.RankType.PP_RANK), batch_size)


def _who(_: int) -> tuple[int, int, str]:
    try:
        smp.broadcast(1, smp.WORLD)
    except RuntimeError as error:
        return smp.pp_rank(), smp.rank(), str(error)
    return smp.pp_rank(), smp.rank(), ""


def check_forked_child() -> None:
    """Loaders may be made in a child: it reads ranks, and is told that it cannot communicate."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as executor:
        pp_rank, rank, message = executor.submit(_who, 0).result(timeout=600)
    assert (pp_rank, rank) == (smp.pp_rank(), smp.rank())
    if smp.size() > 1:
        assert "forked" in message, message
