"""Attention of parts of sequences whose keys and values go around a ring of ranks.

Each rank has the queries of some tokens. Keys and values of the others arrive from one rank after
the other, while those that arrived before are multiplied (Liu et al. 2023, arXiv:2310.01889). Each
owner sends its own, so keys that a rank does not read, because of causality or of a window, are not
sent to it. Gradients of keys and values go back the same way.

Ranks of a host have different heads, see `ring_layout`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import smp._C as _C
from smp.context_parallel import block_attention, regions
from smp.context_parallel.block_attention import Block, Rows
from smp.context_parallel.parts import Heads, Interval
from smp.context_parallel.ring_layout import held_in_parts, held_in_ring
from smp.context_parallel.ring_messages import KeyMessages, Move, move
from smp.context_parallel.ring_work import DotProducts, Rings, Work


def attend_in_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: Heads,
    products: DotProducts,
    rings: Rings,
    length: int,
) -> Tensor:
    """Computes attention of this rank's part of the tokens. Collective over the cp group.

    Args:
        query: ``[B, heads, tokens, D]`` of own tokens and all heads.
        key, value: keys and values, with the heads of `heads` after they were repeated.
        heads: shares of the ranks of a host.
        products: form of attention, of all heads.
        rings: rings of the group.
        length: number of tokens of all ranks.

    Returns:
        ``[B, heads, tokens, V]``.
    """
    ranks = regions.group()
    ring = rings.layout(products, length)
    place, host_rank = divmod(ranks.group_rank, rings.on_host)
    in_parts = [
        held_in_parts(length, sum(of_ranks), ranks.size) for of_ranks in (heads.queries, heads.keys)
    ]
    in_ring = [held_in_ring(ring, of_ranks) for of_ranks in (heads.queries, heads.keys)]
    moves: list[Move] = [(in_parts[idx], in_ring[idx]) for idx in (0, 1, 1)]
    query, key, value = move([query, key, value], moves)
    own = Interval.of_rank(heads.queries, host_rank)
    mine = products.of_heads(own, sum(heads.queries))
    work = Work(ring, place, mine, scale_of(products, query))
    peers = range(host_rank, ranks.size, rings.on_host)
    out: Tensor = _RingAttention.apply(work, peers, query, key, value)
    return move([out], [(in_ring[0], in_parts[0])])[0]


def attend_alone(
    query: Tensor, key: Tensor, value: Tensor, products: DotProducts, rings: Rings
) -> Tensor:
    """Computes what the ranks of a ring would, block by block. Communicates nothing.

    Args:
        query, key, value: tensors of all tokens, and of some heads.
        products: form of attention, of these heads.
        rings: rings of the group.
    """
    ring = rings.layout(products, query.shape[2])
    place = regions.group().group_rank // rings.on_host
    work = Work(ring, place, products, scale_of(products, query))
    merged = _Merged(work, own_of_all(query, products, rings, 2), value.shape[-1])
    for distance in (0, *ring.rounds()):
        if chunks := work.read(distance):
            keys = [
                torch.cat([ring.chunks[idx].of(x, 2) for idx in chunks], 2) for x in (key, value)
            ]
            merged.add(keys, distance)
    return merged.out.to(query.dtype)


def own_of_all(x: Tensor, products: DotProducts, rings: Rings, dim: int) -> Tensor:
    """Returns the tokens of this rank in a ring, of a tensor of all tokens."""
    ring = rings.layout(products, x.shape[dim])
    place = regions.group().group_rank // rings.on_host
    return torch.cat([ring.chunks[idx].of(x, dim) for idx in ring.owned[place]], dim)


def scale_of(products: DotProducts, query: Tensor) -> float:
    """Returns the factor of scores."""
    return query.shape[-1] ** -0.5 if products.scale is None else products.scale


class _Merged:
    """The results of own queries over the keys that were read so far.

    Args:
        work: work of this rank.
        query: own queries.
        num_features: features of values.

    Attributes:
        out: results ``[B, heads, Q, V]``.
        sums: logarithms of the sums of exponentials ``[B, heads, Q]``.
    """

    def __init__(self, work: Work, query: Tensor, num_features: int) -> None:
        exact = torch.promote_types(query.dtype, torch.float32)
        self._work, self._query = work, query
        self.out = query.new_zeros((*query.shape[:3], num_features), dtype=exact)
        self.sums = query.new_full(query.shape[:3], -math.inf, dtype=exact)

    def add(self, keys: Sequence[Tensor], distance: int) -> None:
        """Adds keys and values of a round."""
        for each in _blocks(self._work, self._query, keys, distance):
            query = each.queries.of(self._query, 2)
            out, sums = block_attention.forward(query, each.key, each.value, each.form)
            total, all_sums = each.queries.of(self.out, 2), each.queries.of(self.sums, 2)
            # A row that reads none of the keys has -inf twice, and a weight that is no number.
            weight = torch.sigmoid(sums - all_sums).nan_to_num_(0.0)
            total.lerp_(out.to(total.dtype), weight.unsqueeze(-1))
            all_sums.copy_(torch.logaddexp(all_sums, sums))


@dataclass(frozen=True)
class _Block:
    """A block of a round.

    Attributes:
        queries, keys: places of queries in those of this rank, and of keys in those of the round.
        key, value: keys and values, with as many heads as queries have.
        form: form of attention.
    """

    queries: Interval
    keys: Interval
    key: Tensor
    value: Tensor
    form: Block


def _blocks(work: Work, query: Tensor, keys: Sequence[Tensor], distance: int) -> Iterator[_Block]:
    """Yields the blocks of a round."""
    chunks, heads = work.read(distance), query.shape[1]
    for call in work.ring.calls(work.rank, work.owner(distance)):
        place = work.place(chunks, call.keys)
        key, value = (place.of(x, 2).repeat_interleave(heads // x.shape[1], 1) for x in keys)
        queries, form = work.own_place(call.queries), work.block(call, query.dtype)
        yield _Block(queries, place, key, value, form)


class _Gradients:
    """The gradients of own queries, and of the keys and values of a round.

    Args:
        work: work of this rank.
        rows: own queries, their results and the gradient of these.

    Attributes:
        query: gradient of the queries, of all rounds so far.
    """

    def __init__(self, work: Work, rows: Rows) -> None:
        self._work, self._rows = work, rows
        self.query = torch.zeros_like(rows.query, dtype=rows.sums.dtype)

    def of_keys(self, keys: Sequence[Tensor], distance: int) -> list[Tensor]:
        """Returns the gradients of keys and values of a round, and adds that of queries."""
        found = [torch.zeros_like(x, dtype=self.query.dtype) for x in keys]
        rows = self._rows
        for each in _blocks(self._work, rows.query, keys, distance):
            own = (each.queries.of(x, 2) for x in (rows.query, rows.out, rows.sums, rows.grad))
            of_query, of_key, of_value = block_attention.backward(
                Rows(*own), each.key, each.value, each.form
            )
            each.queries.of(self.query, 2).add_(of_query)
            for total, part in zip(found, (of_key, of_value), strict=True):
                of_heads = part.unflatten(1, (total.shape[1], -1))
                each.keys.of(total, 2).add_(of_heads.sum(2, dtype=total.dtype))
        return found


class _RingAttention(torch.autograd.Function):
    """Attention of own queries over the keys of all ranks of a ring."""

    @staticmethod
    def forward(
        ctx: Any, work: Work, peers: Sequence[int], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        merged = _Merged(work, query, value.shape[-1])
        _go_around(KeyMessages(work, peers, key, value), work, merged.add)
        out = merged.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, merged.sums)
        ctx.work, ctx.peers = work, peers
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, sums = ctx.saved_tensors
        messages = KeyMessages(ctx.work, ctx.peers, key, value)
        gradients = _Gradients(ctx.work, Rows(query, out, sums, grad.contiguous()))
        totals = [torch.zeros_like(x, dtype=sums.dtype) for x in (key, value)]
        back: tuple[_C.PendingTensor, int] | None = None

        def read(keys: Sequence[Tensor], distance: int) -> None:
            nonlocal back
            found = gradients.of_keys(keys, distance)
            if distance == 0:
                place = ctx.work.own_place(ctx.work.read(0))
                for total, part in zip(totals, found, strict=True):
                    place.of(total, 2).add_(part)
                return
            if back is not None:
                messages.add_back(*back, totals)
            back = messages.begin_back([x.to(key.dtype) for x in found], distance), distance

        _go_around(messages, ctx.work, read)
        if back is not None:
            messages.add_back(*back, totals)
        return None, None, *(x.to(key.dtype) for x in (gradients.query, *totals))


def _go_around(
    messages: KeyMessages, work: Work, read: Callable[[Sequence[Tensor], int], None]
) -> None:
    """Hands over keys and values round by round; those of the next one arrive meanwhile."""
    distances = (0, *work.ring.rounds())
    message: _C.PendingTensor | None = None
    for distance, following in zip(distances, (*distances[1:], None), strict=True):
        keys = messages.read(message, distance)
        message = None if following is None else messages.begin(following)
        read(keys, distance)
