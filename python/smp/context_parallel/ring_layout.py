"""Decides which tokens and heads ranks have while attention goes around a ring. Pure functions.

A context-parallel group of C ranks is R hosts, or parts of hosts, with C / R ranks each. Ranks of a
host share heads, as in DeepSpeed-Ulysses, and the R ranks with the same heads form a ring; the two
together are those of USP (Fang & Zhao 2024, arXiv:2405.07719). Each ring rank has two of 2R chunks
of the tokens. If later tokens have more work, as in causal attention, rank i has chunks i and
2R - 1 - i, which is the zigzag of Llama 3 and Megatron-LM; otherwise chunks 2i and 2i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from smp.context_parallel.parts import Interval, even_parts


class Live(IntEnum):
    """Entries that queries of a chunk read of keys of a chunk."""

    NONE = 0
    SOME = 1
    ALL = 2


#: entries by chunk of queries and chunk of keys
LiveTable = Sequence[Sequence[Live]]


def causal_table(num_chunks: int) -> list[list[Live]]:
    """Returns the entries of causal attention."""
    values = (Live.ALL, Live.SOME, Live.NONE)
    return [[values[(k >= q) + (k > q)] for k in range(num_chunks)] for q in range(num_chunks)]


def full_table(num_chunks: int) -> list[list[Live]]:
    """Returns the entries of attention without a mask."""
    return [[Live.ALL] * num_chunks for _ in range(num_chunks)]


def chunks_of(length: int, num_ranks: int, ring: int) -> list[Interval]:
    """Returns the 2R chunks of a sequence; the tokens of a host are two of them.

    Args:
        length: number of tokens of all ranks.
        num_ranks: number of ranks of the context-parallel group.
        ring: number of ranks of a ring.
    """
    parts, on_host = even_parts(length, num_ranks), num_ranks // ring
    sizes: list[int] = []
    for begin in range(0, num_ranks, on_host):
        sizes += even_parts(sum(parts[begin : begin + on_host]), 2)
    return [Interval.of_rank(sizes, idx) for idx in range(len(sizes))]


def assign_chunks(chunks: Sequence[Interval], live: LiveTable) -> list[tuple[int, int]]:
    """Returns the chunks of each ring rank, so that the rank with the most work has little.

    Args:
        chunks: chunks of the tokens.
        live: entries of attention.
    """
    ring = len(chunks) // 2
    in_order = [(2 * i, 2 * i + 1) for i in range(ring)]
    zigzag = [(i, 2 * ring - 1 - i) for i in range(ring)]

    def most(owned: list[tuple[int, int]]) -> int:
        return max(sum(_work(chunks, live, q) for q in pair) for pair in owned)

    return zigzag if most(zigzag) < most(in_order) else in_order


def _work(chunks: Sequence[Interval], live: LiveTable, q: int) -> int:
    return sum(chunks[q].size * k.size for k, kind in zip(chunks, live[q], strict=True) if kind)


@dataclass(frozen=True)
class BlockCall:
    """Attention of some own queries over some keys of a ring rank.

    Attributes:
        queries: numbers of own chunks.
        keys: numbers of chunks of the keys' owner.
        is_full: whether each query reads each key.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    is_full: bool


@dataclass(frozen=True)
class Ring:
    """Chunks and work of all ranks of a ring.

    Attributes:
        chunks: chunks of the tokens.
        owned: chunks of each ring rank.
        live: entries of attention.
    """

    chunks: Sequence[Interval]
    owned: Sequence[tuple[int, int]]
    live: LiveTable

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.owned)

    def keys_for(self, reader: int, owner: int) -> tuple[int, ...]:
        """Returns the chunks of keys of one ring rank that another one reads."""
        return tuple(
            k
            for k in self.owned[owner]
            if self.chunks[k].size and any(self.live[q][k] for q in self.owned[reader])
        )

    def rounds(self) -> list[int]:
        """Returns the distances from which some rank reads keys, without that of zero."""
        ranks = range(self.size)
        return [
            distance
            for distance in range(1, self.size)
            if any(self.keys_for(rank, (rank - distance) % self.size) for rank in ranks)
        ]

    def calls(self, reader: int, owner: int) -> list[BlockCall]:
        """Returns the calls of attention of one ring rank over keys of another one.

        Own keys are read in one call, in which a causal mask is that of its tokens in their order.
        """
        by_keys: dict[tuple[int, ...], list[int]] = {}
        every = self.keys_for(reader, owner)
        for q in self.owned[reader]:
            keys = every if reader == owner else tuple(k for k in every if self.live[q][k])
            if keys and self.chunks[q].size:
                by_keys.setdefault(keys, []).append(q)
        return [
            BlockCall(
                tuple(queries),
                keys,
                all(self.live[q][k] is Live.ALL for q in queries for k in keys),
            )
            for keys, queries in by_keys.items()
        ]


@dataclass(frozen=True)
class Held:
    """The tokens and heads that a rank has.

    Attributes:
        tokens: intervals of the sequence; a tensor has them one after the other.
        heads: heads.
    """

    tokens: tuple[Interval, ...]
    heads: Interval

    @property
    def num_tokens(self) -> int:
        return sum(interval.size for interval in self.tokens)


def held_in_parts(length: int, num_heads: int, num_ranks: int) -> list[Held]:
    """Returns what ranks have outside of attention: a part of the tokens, and all heads."""
    sizes = even_parts(length, num_ranks)
    every = Interval(0, num_heads)
    return [Held((Interval.of_rank(sizes, rank),), every) for rank in range(num_ranks)]


def held_in_ring(ring: Ring, heads: Sequence[int]) -> list[Held]:
    """Returns what ranks have inside of attention.

    Args:
        ring: chunks of the ring ranks.
        heads: numbers of heads of the ranks of a host.
    """
    return [
        Held(tuple(ring.chunks[idx] for idx in pair), Interval.of_rank(heads, rank))
        for pair in ring.owned
        for rank in range(len(heads))
    ]


@dataclass(frozen=True)
class Piece:
    """Elements that one rank sends to another one.

    Attributes:
        from_tokens, to_tokens: tokens in the tensors of the sender and of the receiver.
        from_heads, to_heads: heads there.
    """

    from_tokens: Interval
    to_tokens: Interval
    from_heads: Interval
    to_heads: Interval


def pieces(source: Held, target: Held) -> list[Piece]:
    """Returns what a rank with `source` sends to a rank that needs `target`."""
    heads = _overlap(source.heads, target.heads)
    found: list[Piece] = []
    from_begin = 0
    for has in source.tokens:
        to_begin = 0
        for needs in target.tokens:
            tokens = _overlap(has, needs)
            if heads.size and tokens.size:
                found.append(
                    Piece(
                        Interval(from_begin + tokens.begin - has.begin, tokens.size),
                        Interval(to_begin + tokens.begin - needs.begin, tokens.size),
                        Interval(heads.begin - source.heads.begin, heads.size),
                        Interval(heads.begin - target.heads.begin, heads.size),
                    )
                )
            to_begin += needs.size
        from_begin += has.size
    return found


def _overlap(a: Interval, b: Interval) -> Interval:
    begin = max(a.begin, b.begin)
    return Interval(begin, max(0, min(a.begin + a.size, b.begin + b.size) - begin))
