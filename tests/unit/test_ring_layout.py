"""Decisions about rings: who has which chunks, reads which keys and sends what."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smp.context_parallel.parts import even_parts, share_heads
from smp.context_parallel.ring_layout import (
    Held,
    Live,
    Ring,
    assign_chunks,
    causal_table,
    chunks_of,
    full_table,
    held_in_parts,
    held_in_ring,
    pieces,
)
from smp.context_parallel.ring_work import DotProducts, Rings, Work

RINGS = st.tuples(st.integers(1, 5), st.integers(1, 3))


@given(length=st.integers(15, 90), ring=RINGS)
def test_chunks_cover_the_tokens_and_are_those_of_hosts(length: int, ring: tuple[int, int]) -> None:
    size, on_host = ring
    num_ranks = size * on_host
    chunks = chunks_of(length, num_ranks, size)
    assert len(chunks) == 2 * size
    assert [c.begin for c in chunks] == [sum(c.size for c in chunks[:i]) for i in range(2 * size)]
    parts = even_parts(length, num_ranks)
    for host in range(size):
        tokens = sum(parts[host * on_host : (host + 1) * on_host])
        assert chunks[2 * host].size + chunks[2 * host + 1].size == tokens


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ranks_of_causal_attention_have_equal_work(size: int) -> None:
    chunks = chunks_of(64 * size, size, size)
    table = causal_table(2 * size)
    owned = assign_chunks(chunks, table)
    assert owned == [(i, 2 * size - 1 - i) for i in range(size)]
    work = [sum(bool(kind) for q in pair for kind in table[q]) for pair in owned]
    assert len(set(work)) == 1
    assert assign_chunks(chunks, full_table(2 * size)) == [(2 * i, 2 * i + 1) for i in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_calls_cover_each_live_pair_once(size: int) -> None:
    chunks = chunks_of(10 * size, size, size)
    table = causal_table(2 * size)
    ring = Ring(chunks, assign_chunks(chunks, table), table)
    pairs = [
        (q, k)
        for rank in range(size)
        for distance in (0, *ring.rounds())
        for call in ring.calls(rank, (rank - distance) % size)
        for q in call.queries
        for k in call.keys
    ]
    assert len(pairs) == len(set(pairs))
    live = {(q, k) for q in range(2 * size) for k in range(2 * size) if table[q][k]}
    assert live <= set(pairs)
    beside = set(pairs) - live  # a causal call on own chunks has the pair above the diagonal
    assert all(any(q in pair and k in pair for pair in ring.owned) for q, k in beside)


@given(length=st.integers(15, 60), ring=RINGS, heads=st.integers(3, 9), causal=st.booleans())
def test_each_element_goes_to_one_place(
    length: int, ring: tuple[int, int], heads: int, causal: bool
) -> None:
    size, on_host = ring
    rings = Rings(size * on_host, size)
    layout = rings.layout(DotProducts(None, causal, None), length)
    shares = share_heads(heads, heads, on_host)
    assert shares is not None
    before = held_in_parts(length, heads, rings.num_ranks)
    after = held_in_ring(layout, shares.queries)
    whole = torch.arange(heads * length).view(1, heads, length)

    def part(held: Held) -> torch.Tensor:
        tokens = torch.cat([interval.of(whole, 2) for interval in held.tokens], 2)
        return held.heads.of(tokens, 1)

    for way in ((before, after), (after, before)):
        for target in way[1]:
            found = torch.full_like(part(target), -1)
            for source in way[0]:
                for piece in pieces(source, target):
                    sent = piece.from_tokens.of(piece.from_heads.of(part(source), 1), 2)
                    place = piece.to_tokens.of(piece.to_heads.of(found, 1), 2)
                    assert (place == -1).all()
                    place.copy_(sent)
            assert torch.equal(found, part(target))


def _window(length: int, size: int) -> torch.Tensor:
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance < size)


def test_a_window_reads_from_neighbours_only() -> None:
    rings = Rings(8, 8)
    layout = rings.layout(DotProducts(_window(160, 8), False, None), 160)
    assert layout.owned == [(2 * i, 2 * i + 1) for i in range(8)]
    assert layout.rounds() == [1]
    assert all(layout.keys_for(rank, rank - 1) == (2 * rank - 1,) for rank in range(1, 8))
    assert layout.keys_for(0, 7) == ()


def test_documents_are_read_by_their_ranks_only() -> None:
    document = torch.arange(64) // 16
    mask = document[:, None] == document
    layout = Rings(4, 4).layout(DotProducts(mask[None, None], False, None), 64)
    assert layout.rounds() == []
    assert all(
        kind is Live.ALL for pair in layout.owned for kind in (layout.live[pair[0]][pair[0]],)
    )


def test_a_mask_is_looked_at_once_until_it_is_written() -> None:
    rings = Rings(2, 2)
    mask = torch.ones(8, 8, dtype=torch.bool)
    first = rings.layout(DotProducts(mask[None], False, None), 8).live
    assert rings.layout(DotProducts(mask[None], False, None), 8).live is first
    mask[:, 4:] = False
    second = rings.layout(DotProducts(mask[None], False, None), 8).live
    assert [row[3] for row in second] == [Live.NONE] * 4


def test_added_masks_are_left_out_where_they_are_minus_infinity_only() -> None:
    mask = torch.zeros(8, 8).masked_fill(~_window(8, 8), -math.inf)
    mask[0, 7] = torch.finfo(torch.float32).min
    table = Rings(2, 2).layout(DotProducts(mask, False, None), 8).live
    expected = [[int(k <= q or (q, k) == (0, 3)) for k in range(4)] for q in range(4)]
    assert [[int(kind) for kind in row] for row in table] == expected


def test_masks_of_blocks_are_parts_of_the_mask() -> None:
    mask = torch.rand(2, 1, 12, 12) > 0.5
    products = DotProducts(mask, False, None)
    ring = Rings(3, 3).layout(products, 12)
    for rank in range(3):
        work = Work(ring, rank, products, 1.0)
        for distance in (0, 1, 2):
            for call in ring.calls(rank, work.owner(distance)):
                rows, columns = (
                    torch.cat(
                        [
                            torch.arange(12)[ring.chunks[i].begin :][: ring.chunks[i].size]
                            for i in each
                        ]
                    )
                    for each in (call.queries, call.keys)
                )
                expected = mask[:, :, rows][..., columns]
                form = work.block(call, torch.float64)
                found = form.mask
                allowed = torch.ones_like(expected) if found is None else found == 0
                assert torch.equal(allowed, expected)
