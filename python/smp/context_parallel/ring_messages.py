"""Messages of attention that goes around a ring. All are collective over the cp group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import smp._C as _C
from smp.context_parallel import regions
from smp.context_parallel.ring_layout import Held, pieces
from smp.context_parallel.ring_work import Work

#: what ranks have before and after a tensor was moved, by rank of the group
Move = tuple[list[Held], list[Held]]


def move(tensors: Sequence[Tensor], moves: Sequence[Move]) -> list[Tensor]:
    """Moves tensors between layouts of tokens and heads, in one message; backward: the inverse.

    Args:
        tensors: ``[B, heads, tokens, *]`` of one dtype.
        moves: layouts of each.
    """
    return list(_Move.apply(list(moves), *tensors))


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, moves: list[Move], *tensors: Tensor) -> Any:
        ctx.moves = moves
        return _moved(tensors, moves, "tokens and heads of a ring")

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inverse = [(target, source) for source, target in ctx.moves]
        return None, *_moved(grads, inverse, "gradients of tokens and heads of a ring")


def _moved(tensors: Sequence[Tensor], moves: Sequence[Move], what: str) -> tuple[Tensor, ...]:
    ranks, own = range(regions.group().size), regions.group().group_rank
    each = [(x, *way) for x, way in zip(tensors, moves, strict=True)]
    sent = [
        [
            piece.from_tokens.of(piece.from_heads.of(x, 1), 2)
            for x, source, target in each
            for piece in pieces(source[own], target[rank])
        ]
        for rank in ranks
    ]
    results = [
        x.new_empty(x.shape[0], target[own].heads.size, target[own].num_tokens, *x.shape[3:])
        for x, _, target in each
    ]
    received = [
        [
            piece.to_tokens.of(piece.to_heads.of(result, 1), 2)
            for result, (_, source, target) in zip(results, each, strict=True)
            for piece in pieces(source[rank], target[own])
        ]
        for rank in ranks
    ]
    flat = torch.cat([x.reshape(-1) for of_rank in sent for x in of_rank])
    given, taken = (
        [sum(x.numel() for x in of_rank) for of_rank in way] for way in (sent, received)
    )
    flat = regions.group().begin_row_exchange(flat, given, taken, what).take()
    places = [x for of_rank in received for x in of_rank]
    for place, part in zip(places, flat.split([x.numel() for x in places]), strict=True):
        place.copy_(part.view(place.shape))
    return tuple(results)


class KeyMessages:
    """Keys and values, or their gradients, between ranks of a ring.

    Args:
        work: work of this rank.
        peers: ranks of the ring in the context-parallel group.
        key, value: keys and values of this rank, ``[B, heads, tokens, *]``.
    """

    def __init__(self, work: Work, peers: Sequence[int], key: Tensor, value: Tensor) -> None:
        self._work, self._peers = work, peers
        self._own = key, value

    def begin(self, distance: int) -> _C.PendingTensor:
        """Begins to send own keys and values to their reader, and to receive those to read."""
        work = self._work
        place = work.own_place(work.lent(distance))
        sent = [place.of(x, 2) for x in self._own]
        return self._begin(sent, work.reader(distance), work.owner(distance), work.read(distance))

    def begin_back(self, grads: Sequence[Tensor], distance: int) -> _C.PendingTensor:
        """Begins to send gradients of what was read to its owner, and to receive own ones."""
        work = self._work
        return self._begin(grads, work.owner(distance), work.reader(distance), work.lent(distance))

    def read(self, message: _C.PendingTensor | None, distance: int) -> list[Tensor]:
        """Returns keys and values of a round that arrived; without a message the own ones."""
        chunks = self._work.read(distance)
        if message is None:
            return [self._work.own_place(chunks).of(x, 2) for x in self._own]
        return self._arrived(message, chunks)

    def add_back(self, message: _C.PendingTensor, distance: int, totals: Sequence[Tensor]) -> None:
        """Adds gradients that arrived to those of own keys and values."""
        chunks = self._work.lent(distance)
        place = self._work.own_place(chunks)
        for total, part in zip(totals, self._arrived(message, chunks), strict=True):
            place.of(total, 2).add_(part)

    def _begin(
        self, sent: Sequence[Tensor], to: int, source: int, chunks: tuple[int, ...]
    ) -> _C.PendingTensor:
        flat = torch.cat([x.reshape(-1) for x in sent])
        given, taken = ([0] * regions.group().size for _ in range(2))
        given[self._peers[to]] = flat.numel()
        taken[self._peers[source]] = sum(math.prod(shape) for shape in self._shapes(chunks))
        return regions.group().begin_row_exchange(flat, given, taken, "keys and values of a ring")

    def _arrived(self, message: _C.PendingTensor, chunks: tuple[int, ...]) -> list[Tensor]:
        shapes = self._shapes(chunks)
        parts = message.take().split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _shapes(self, chunks: tuple[int, ...]) -> list[tuple[int, ...]]:
        num_tokens = self._work.num_tokens(chunks)
        return [(*x.shape[:2], num_tokens, x.shape[3]) for x in self._own]
