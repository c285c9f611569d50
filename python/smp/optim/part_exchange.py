"""Sends the parts of tensors to the ranks that own them, and updated parts back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.tensor_parallel.cutting import cut, join
from smp.tensor_parallel.parts import Part
from smp.world import host_objects
from smp.world.rank import Rank

#: Bytes of the tensors that are exchanged in one collective. While one is under way, the next is
#: packed and the one before is unpacked.
_ROUND_BYTES = 32 * 2**20


@dataclass(eq=False)
class SpreadTensor:
    """A parameter of an optimizer whose elements lie on several ranks.

    Attributes:
        index: index in the optimizer's state dicts.
        part: elements of this rank: the master, or the slice of a tensor-parallel rank.
        shape: sizes of the whole tensor.
        parts: elements of each rank of the group.
        owner: position of the owner in the group.
        whole: leaf with all elements on the owner; None on other ranks.
    """

    index: int
    part: Tensor
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    owner: int
    whole: nn.Parameter | None


@dataclass(frozen=True)
class Holders:
    """The ranks that hold all parts of some tensors.

    Attributes:
        ranks: global ranks, ascending.
        communicator: group that has these ranks, and perhaps further ones.
        members: global ranks of that group.
    """

    ranks: tuple[int, ...]
    communicator: _C.Communicator
    members: tuple[int, ...]


@dataclass(frozen=True)
class _Flight:
    tensors: Sequence[SpreadTensor]
    work: _C.Work | None
    received: Tensor
    kept: Tensor  # what is sent, until it is


class PartExchange:
    """Exchanges the parts of tensors between the ranks of one group and the tensors' owners.

    All methods but `gather_objects` run in rounds; each is collective over the ranks of the
    communicator.

    Args:
        rank: rank of this process.
        holders: ranks that hold the parts.
        tensors: tensors in one order on all ranks.

    Attributes:
        bytes_sent: bytes of elements that this rank has sent so far.
    """

    def __init__(self, rank: Rank, holders: Holders, tensors: Sequence[SpreadTensor]) -> None:
        self._rank = rank
        self._holders = holders
        self._position = holders.ranks.index(rank.global_rank)
        self._places = [holders.members.index(each) for each in holders.ranks]
        self.tensors = list(tensors)
        self.bytes_sent = 0

    def owns(self, tensor: SpreadTensor) -> bool:
        return tensor.owner == self._position

    def to_owners(
        self, tensors: Sequence[SpreadTensor], values_of: Callable[[SpreadTensor], Tensor]
    ) -> Iterator[tuple[SpreadTensor, Tensor]]:
        """Yields whole values of the tensors that this rank owns. Collective.

        Args:
            tensors: tensors in one order on all ranks.
            values_of: returns this rank's elements of a tensor.
        """

        def begin(tensors: Sequence[SpreadTensor]) -> _Flight:
            sent = [[values_of(t).reshape(-1) for t in tensors if t.owner == p] for p in self._all]
            own = [t for t in tensors if self.owns(t)]
            sizes = [sum(t.parts[p].flat_numel for t in own) for p in self._all]
            return self._begin(tensors, sent, sizes)

        for flight in self._in_rounds(tensors, begin):
            own = [t for t in flight.tensors if self.owns(t)]
            pieces: dict[SpreadTensor, list[tuple[Tensor, Part]]] = {
                t: [(values_of(t).reshape(-1), t.parts[self._position])] for t in own
            }
            places = [(t, t.parts[p]) for p in self._others for t in own]
            values = flight.received.split([part.flat_numel for _, part in places])
            for (tensor, part), piece in zip(places, values, strict=True):
                pieces[tensor].append((piece, part))
            for tensor in own:
                yield tensor, join(pieces[tensor], tensor.shape)

    def to_holders(
        self, tensors: Sequence[SpreadTensor]
    ) -> Iterator[tuple[list[SpreadTensor], list[Tensor]]]:
        """Yields tensors, and their owners' values of this rank's parts. Collective.

        Args:
            tensors: tensors in one order on all ranks.
        """

        def begin(tensors: Sequence[SpreadTensor]) -> _Flight:
            own = [t for t in tensors if self.owns(t)]
            sent = [[_values(t, t.parts[p]) for t in own] for p in self._all]
            sizes = [
                sum(t.parts[self._position].flat_numel for t in tensors if t.owner == p)
                for p in self._all
            ]
            return self._begin(tensors, sent, sizes)

        for flight in self._in_rounds(tensors, begin):
            others = [t for p in self._others for t in flight.tensors if t.owner == p]
            parts = [t.parts[self._position] for t in others]
            values = list(flight.received.split([part.flat_numel for part in parts]))
            own = [t for t in flight.tensors if self.owns(t)]
            values += [_values(t, t.parts[self._position]) for t in own]
            yield others + own, values

    def gather_objects(self, obj: object, what: str) -> list[object]:
        """Returns the objects of all ranks of the group, by position. Collective over the group."""
        exchange = self._rank.exchange
        assert exchange is not None
        own = host_objects.pack(obj)
        with self._rank.reporting(what):
            parts = exchange.all_gather(list(self._holders.ranks), own, what)
        return [host_objects.unpack(part, self._rank.device) for part in parts]

    @property
    def _all(self) -> range:
        return range(len(self._holders.ranks))

    @property
    def _others(self) -> list[int]:
        return [position for position in self._all if position != self._position]

    def _in_rounds(
        self,
        tensors: Sequence[SpreadTensor],
        begin: Callable[[Sequence[SpreadTensor]], _Flight],
    ) -> Iterator[_Flight]:
        """Yields ended exchanges, each while the next one is under way."""
        flights: deque[_Flight] = deque()
        for one in _rounds(tensors):
            flights.append(begin(one))
            if len(flights) > 1:
                yield self._ended(flights.popleft())
        while flights:
            yield self._ended(flights.popleft())

    def _begin(
        self,
        tensors: Sequence[SpreadTensor],
        sent: Sequence[Sequence[Tensor]],
        sizes: Sequence[int],
    ) -> _Flight:
        """Starts an exchange; what this rank keeps is not part of it.

        Args:
            tensors: tensors of the round, of one dtype and device.
            sent: flat values for each rank of the group.
            sizes: number of elements that come from each rank of the group.
        """
        like = tensors[0].part
        others = self._others
        values = [value for position in others for value in sent[position]]
        outgoing = torch.cat(values) if values else like.new_empty(0)
        incoming = like.new_empty(sum(sizes[position] for position in others))
        if not any(_moves(tensor) for tensor in tensors):
            return _Flight(tensors, None, incoming, outgoing)
        group = self._holders.communicator
        out_counts, in_counts = [0] * group.size, [0] * group.size
        for position in others:
            out_counts[self._places[position]] = sizes[position]
            in_counts[self._places[position]] = sum(value.numel() for value in sent[position])
        self.bytes_sent += outgoing.nbytes
        work = group.all_to_all_v(incoming, outgoing, out_counts, in_counts)
        return _Flight(tensors, work, incoming, outgoing)

    def _ended(self, flight: _Flight) -> _Flight:
        if flight.work is not None:
            _C.follow(
                flight.work,
                self._holders.communicator,
                what=f"exchange of {len(flight.tensors)} tensors with the ranks that update them",
                faults=self._rank.board,
                ranks=list(self._holders.members),
                timeout_s=self._rank.timeout_s,
            )
        return flight


def _values(tensor: SpreadTensor, part: Part) -> Tensor:
    """Returns the owner's values of a part, flat."""
    assert tensor.whole is not None
    return cut(tensor.whole.detach(), part)


def _moves(tensor: SpreadTensor) -> bool:
    """Returns whether other ranks hold elements than the owner."""
    others = (part for position, part in enumerate(tensor.parts) if position != tensor.owner)
    return any(part.flat_numel for part in others)


def _rounds(tensors: Sequence[SpreadTensor]) -> Iterator[list[SpreadTensor]]:
    """Yields the tensors of each collective, which have one dtype."""
    by_dtype: dict[torch.dtype, list[SpreadTensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.part.dtype, []).append(tensor)
    for own in by_dtype.values():
        one: list[SpreadTensor] = []
        num_bytes = 0
        for tensor in own:
            one.append(tensor)
            num_bytes += torch.Size(tensor.shape).numel() * tensor.part.itemsize
            if num_bytes >= _ROUND_BYTES:
                yield one
                one, num_bytes = [], 0
        if one:
            yield one
