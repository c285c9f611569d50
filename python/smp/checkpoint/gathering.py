"""Gathers tensors of a partitioned model on the ranks that ask for them, one at a time."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smp.checkpoint.archive import Deferred
from smp.checkpoint.entries import model_state
from smp.checkpoint.lazy_tensor import LazyTensor
from smp.model import DistributedModel
from smp.storage.parts import Named
from smp.tensor_parallel.cutting import part_of, slice_of
from smp.tensor_parallel.parts import Part
from smp.tensor_parallel.sharding import interval_of
from smp.world import comm
from smp.world.rank import Rank

#: Most bytes of a message, since it is copied on its way.
_PIECE_BYTES = 32 << 20


@dataclass(frozen=True)
class _Step:
    """A tensor that is made in its turn.

    Attributes:
        tensor: the tensor; its values are not there yet.
        leaves: names of the model's tensors that it is made of.
        receivers: global ranks that make it.
        needs: leaves that are sent in this turn, and their receivers, which have not got them yet.
    """

    tensor: Tensor
    leaves: Sequence[str]
    receivers: Sequence[int]
    needs: Sequence[tuple[str, Sequence[int]]]


class Gatherer:
    """Gathers the tensors of a partitioned model on some ranks, one at a time, in one order.

    Every rank makes a gatherer and gives it the same content to :meth:`plan`. Then each rank makes
    the tensors that it receives, serves the turns of others meanwhile, and drains the rest. A
    leaf stays on a rank until the last tensor made of it is made there. A message waits for its
    receiver, so ranks do not run ahead of each other by more than one message.

    Args:
        model: partitioned model.
        rank: rank of this process.
        copies: gather copies of what this rank has itself. Otherwise results may be the memory of
            the model.
    """

    def __init__(self, model: DistributedModel, rank: Rank, copies: bool = False) -> None:
        self._rank, self._copies = rank, copies
        self.state = model_state(model, rank)
        self._dtypes: dict[str, torch.dtype] = {}
        self._owned: dict[str, tuple[int, bool]] = {}  # pipeline rank, and whether it is split
        self._steps: list[_Step] = []
        self._num_served = 0
        self._uses: Counter[str] = Counter()
        self._here: dict[str, Tensor] = {}
        self._gone: set[int] = set()
        self._drops = False
        self._owners = functools.cache(self._find_owners)

    def lazy_state(
        self, dtype_of: Callable[[Named], torch.dtype] | None = None
    ) -> dict[str, Tensor]:
        """Returns the state dict, whose tensors are made of gathered ones on demand.

        Args:
            dtype_of: function that returns the dtype in which a tensor of the model is sent; None:
                that of the tensor.
        """
        leaves = {}
        for name, named in self.state.tensors.items():
            self._dtypes[name] = named.tensor.dtype if dtype_of is None else dtype_of(named)
            self._owned[name] = named.owner, interval_of(named.tensor) is not None
            make = functools.partial(self._here.__getitem__, name)
            leaves[name] = LazyTensor.leaf(name, named.shape, self._dtypes[name], make)
        return {key: leaves[name] for key, name in self.state.keys.items()}

    def extra_state(self) -> dict[str, Any]:
        """Returns the extra state of modules, by key. Collective over the first rank's replica."""
        if 0 not in self._rank.groups["mp"]:
            return {}
        merged: dict[str, Any] = {}
        for part in comm.allgather(self.state.others, comm.MP_GROUP):
            merged = {**part, **merged}
        return merged

    def plan(
        self, content: Mapping[str, Tensor], receivers: Mapping[str, Sequence[int]]
    ) -> dict[str, Deferred]:
        """Sets the order in which tensors are gathered.

        Args:
            content: tensors of :meth:`lazy_state`, and others made of them, in this order.
            receivers: global ranks that make them, by the same keys.

        Returns:
            tensors that their receivers make in this order. Those with several keys are one
            object, so that a file has them once.
        """
        deferred: dict[int, Deferred] = {}
        sent: set[tuple[str, int]] = set()
        for key, tensor in content.items():
            if id(tensor) in deferred:
                continue
            leaves = sorted(tensor.leaves) if isinstance(tensor, LazyTensor) else []
            needs = []
            for leaf in leaves:
                news = [rank for rank in receivers[key] if (leaf, rank) not in sent]
                sent.update((leaf, rank) for rank in news)
                needs += [(leaf, news)] if news else []
            if self._rank.global_rank in receivers[key]:
                self._uses.update(leaves)
            make = functools.partial(self._made, len(self._steps))
            deferred[id(tensor)] = Deferred(tuple(tensor.shape), tensor.dtype, make)
            self._steps.append(_Step(tensor, leaves, receivers[key], needs))
        return {key: deferred[id(tensor)] for key, tensor in content.items()}

    def _made(self, idx: int) -> Tensor:
        """Makes a tensor of gathered ones, after serving the turns before. Receivers."""
        assert self._num_served <= idx and not self._drops, f"turn {idx} is over"
        self.serve(idx + 1)
        step = self._steps[idx]
        result = step.tensor.make() if isinstance(step.tensor, LazyTensor) else step.tensor
        for name in step.leaves:
            self._uses[name] -= 1
            if self._uses[name] == 0:
                del self._here[name]
        return result

    def serve(self, end: int) -> None:
        """Takes part in the turns before the ``end``-th."""
        while self._num_served < end:
            step = self._steps[self._num_served]
            self._num_served += 1
            for name, receivers in step.needs:
                whole = self._gathered(name, [r for r in receivers if r not in self._gone])
                if whole is not None and not self._drops:
                    self._here[name] = whole

    def drain(self, end: int | None = None) -> None:
        """Takes part in the turns before the ``end``-th, or all; this rank makes no more tensors.

        Leaves that come to this rank are dropped.
        """
        self._drops = True
        self._here.clear()
        self.serve(len(self._steps) if end is None else end)

    def leave_out(self, ranks: Iterable[int]) -> None:
        """Sends nothing more to some receivers. All ranks do the same at the same turn."""
        self._gone.update(ranks)

    def sources(self, name: str, receiver: int) -> tuple[int, ...]:
        """Returns the global ranks of the receiver's replica that have a tensor of the model.

        Several ranks have a slice each. Of a tensor that all ranks of a tensor-parallel group have,
        the source is the receiver itself if it is one of them.
        """
        return self._owners(receiver, *self._owned[name])

    def _find_owners(self, receiver: int, pp_rank: int, is_split: bool) -> tuple[int, ...]:
        """Returns the ranks of a replica that have a tensor of a pipeline rank."""
        grid = self._rank.grid
        replica = [(rank, grid.coordinates(rank)) for rank in grid.group("mp", receiver)]
        owners = sorted((at.tp, rank) for rank, at in replica if at.pp == pp_rank)
        ranks = tuple(rank for _, rank in owners)
        if is_split:
            return ranks
        return (receiver,) if receiver in ranks else ranks[:1]

    def _gathered(self, name: str, receivers: Sequence[int]) -> Tensor | None:
        """Takes part in gathering a tensor of the model; returns it whole if this rank receives.

        Messages go in one order that all ranks know, so each waits for those before it only.
        """
        named, own = self.state.tensors[name], self._rank.global_rank
        ways = [(source, to) for to in receivers for source in self.sources(name, to)]
        value = named.tensor.detach()
        shards = self._rank.groups["shard"]
        if self.state.storage.gathers(named.tensor) and any(rank in shards for rank, _ in ways):
            value = self.state.storage.gathered(named.tensor)
        dtype = self._dtypes[name]
        if ways == [(own, own)]:
            return value.to(device="cpu", dtype=dtype, copy=self._copies).view(named.shape)
        whole: _Whole | None = None
        for source, to in ways:
            if source == own != to:
                for piece in _pieces(value, dtype):
                    comm.send((part_of(named.tensor), piece), to, comm.RankType.WORLD_RANK)
            elif to == own:
                whole = whole or _Whole(named, dtype)
                if source == own:
                    whole.take_own(value, part_of(named.tensor))
                else:
                    whole.take_from(source)
        return None if whole is None else whole.finished()


def _pieces(value: Tensor, dtype: torch.dtype) -> Iterable[Tensor]:
    """Yields the elements of a tensor on the host, at least one piece."""
    flat = value.reshape(-1)
    for piece in flat.split(_piece_numel(dtype)) if flat.numel() else (flat,):
        yield piece.to(device="cpu", dtype=dtype)


def _piece_numel(dtype: torch.dtype) -> int:
    return _PIECE_BYTES // dtype.itemsize


class _Whole:
    """A whole tensor on the host, put together from the slices of its sources."""

    def __init__(self, named: Named, dtype: torch.dtype) -> None:
        self._named, self._dtype = named, dtype
        self._tensor: Tensor | None = None
        self._slices: list[tuple[int, int]] = []
        self._extent = 0

    def take_own(self, value: Tensor, part: Part) -> None:
        """Takes the slice of this rank."""
        region = self._region(part)
        region.copy_(value.reshape(region.shape))

    def take_from(self, source: int) -> None:
        """Receives the slice of another rank."""
        part, piece = comm.recv_from(source, comm.RankType.WORLD_RANK)
        region = self._region(part)
        flat = torch.empty(part.flat_numel, dtype=self._dtype)
        if region.is_contiguous():
            flat = region.view(-1)
        begin = 0
        for idx in range(max(1, math.ceil(part.flat_numel / _piece_numel(self._dtype)))):
            if idx > 0:
                _, piece = comm.recv_from(source, comm.RankType.WORLD_RANK)
            flat[begin : begin + piece.numel()].copy_(piece)
            begin += piece.numel()
        if not region.is_contiguous():
            region.copy_(flat.view(region.shape))

    def _region(self, part: Part) -> Tensor:
        """Returns the place of a slice."""
        if self._tensor is None:
            self._tensor = torch.empty(self._named.shape, dtype=self._dtype)
        self._note(part)
        return slice_of(self._tensor, part)

    def _note(self, part: Part) -> None:
        self._slices.append((part.begin, part.end))
        self._extent = part.extent

    def finished(self) -> Tensor:
        end = 0
        for first, last in sorted(self._slices):
            end = max(end, last) if first <= end else end
        if self._tensor is None or end != self._extent:
            raise ValueError(
                f"'{self._named.name}' is split into {self._extent}, and only {self._slices} came"
            )
        return self._tensor
