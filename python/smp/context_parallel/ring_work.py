"""Work of one rank in attention that goes around a ring: the keys that it reads, and masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from smp.context_parallel.block_attention import Block
from smp.context_parallel.parts import Interval
from smp.context_parallel.ring_layout import (
    BlockCall,
    Live,
    LiveTable,
    Ring,
    assign_chunks,
    causal_table,
    chunks_of,
    full_table,
)


@dataclass(frozen=True, eq=False)
class DotProducts:
    """Arguments of ``scaled_dot_product_attention`` that say all about a call of attention.

    Attributes:
        mask: mask of all tokens, ``[..., S, S]`` or with 1 for S, bool or added to scores; or None.
        is_causal: whether tokens read themselves and those before.
        scale: factor of scores; None: ``1 / sqrt(D)``.
    """

    mask: Tensor | None
    is_causal: bool
    scale: float | None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DotProducts) or (self.mask is None) != (other.mask is None):
            return False
        has_one_mask = self.mask is None or torch.equal(self.mask, other.mask)  # type: ignore[arg-type]
        return has_one_mask and (self.is_causal, self.scale) == (other.is_causal, other.scale)

    def of_heads(self, own: Interval, num_heads: int) -> DotProducts:
        """Returns the form of some heads; a mask may have values for each."""
        mask = self.mask
        if mask is None or mask.dim() < 3 or mask.shape[-3] != num_heads or num_heads == 1:
            return self
        return DotProducts(own.of(mask, mask.dim() - 3), self.is_causal, self.scale)


class Rings:
    """The rings of a context-parallel group, and the layouts of masks that have passed.

    Args:
        num_ranks: number of ranks of the group.
        size: number of ranks of a ring; 1: all ranks of the group share heads.
    """

    def __init__(self, num_ranks: int, size: int) -> None:
        self.num_ranks, self.size = num_ranks, size
        self._tables: Any = WeakIdKeyDictionary()

    @property
    def on_host(self) -> int:
        """The number of ranks that share heads."""
        return self.num_ranks // self.size

    def layout(self, products: DotProducts, length: int) -> Ring:
        """Returns the layout of a call, the same on all ranks. May wait for the device.

        Args:
            products: form of the call.
            length: number of tokens of all ranks.
        """
        chunks = chunks_of(length, self.num_ranks, self.size)
        table = self._table(products, chunks)
        return Ring(chunks, assign_chunks(chunks, table), table)

    def _table(self, products: DotProducts, chunks: Sequence[Interval]) -> LiveTable:
        mask = products.mask
        if mask is None:
            return (causal_table if products.is_causal else full_table)(len(chunks))
        if mask.is_inference():  # it does not say whether it was written
            return _table_of(mask, chunks)
        base = mask if mask._base is None else mask._base  # each layer has a view of its own
        view = (mask.storage_offset(), mask.shape, mask.stride(), mask._version, len(chunks))
        tables = self._tables.setdefault(base, {})
        if view not in tables:
            tables[view] = _table_of(mask, chunks)
        table: LiveTable = tables[view]
        return table


def _table_of(mask: Tensor, chunks: Sequence[Interval]) -> LiveTable:
    """Returns which entries a mask leaves."""
    mask = _square(mask, chunks)
    found = [_live(k.of(q.of(mask, -2), -1)) for q in chunks for k in chunks]
    kinds = [Live(number) for number in torch.stack(found).tolist()]
    return [kinds[begin : begin + len(chunks)] for begin in range(0, len(kinds), len(chunks))]


def _live(mask: Tensor) -> Tensor:
    if mask.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=mask.device)
    if mask.dtype is torch.bool:
        return mask.any().long() + mask.all().long()
    return (mask != -math.inf).any().long()  # added numbers are always applied


def _square(mask: Tensor, chunks: Sequence[Interval]) -> Tensor:
    length = sum(chunk.size for chunk in chunks)
    return mask.expand(*mask.shape[:-2], length, length)


@dataclass(frozen=True)
class Work:
    """Work of this rank in a call of attention.

    Attributes:
        ring: chunks of all ranks of the ring.
        rank: place of this rank in the ring.
        products: form of the call; a mask of heads has those of this rank.
        scale: factor of scores.
    """

    ring: Ring
    rank: int
    products: DotProducts
    scale: float

    def owner(self, distance: int) -> int:
        """Returns the rank whose keys are read in the round of a distance."""
        return (self.rank - distance) % self.ring.size

    def reader(self, distance: int) -> int:
        """Returns the rank that reads own keys in the round of a distance."""
        return (self.rank + distance) % self.ring.size

    def read(self, distance: int) -> tuple[int, ...]:
        """Returns the chunks of keys that are read in a round."""
        return self.ring.keys_for(self.rank, self.owner(distance))

    def lent(self, distance: int) -> tuple[int, ...]:
        """Returns the own chunks of keys that the reader of a round reads."""
        return self.ring.keys_for(self.reader(distance), self.rank)

    def own_place(self, chunks: Sequence[int]) -> Interval:
        """Returns the place of own chunks in tensors of this rank."""
        return self.place(self.ring.owned[self.rank], chunks)

    def place(self, every: Sequence[int], chunks: Sequence[int]) -> Interval:
        """Returns the place of some neighbouring chunks in tensors that have `every` chunk."""
        if not chunks:
            return Interval(0, 0)
        before = every[: every.index(chunks[0])]
        return Interval(self.num_tokens(before), self.num_tokens(chunks))

    def num_tokens(self, chunks: Sequence[int]) -> int:
        """Returns the number of tokens of chunks."""
        return sum(self.ring.chunks[idx].size for idx in chunks)

    def block(self, call: BlockCall, dtype: torch.dtype) -> Block:
        """Returns the form of a block.

        Args:
            call: queries and keys.
            dtype: dtype of a mask.
        """
        mask = self.products.mask
        if mask is None:
            return Block(None, not call.is_full, self.scale)
        if call.is_full and mask.dtype is torch.bool:
            return Block(None, False, self.scale)
        mask = _square(mask, self.ring.chunks)
        mask = mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape)
        for dim, chunks in ((2, call.queries), (3, call.keys)):
            parts = [self.ring.chunks[idx].of(mask, dim) for idx in chunks]
            mask = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        if mask.dtype is torch.bool:
            zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            mask = zeros.masked_fill(~mask, -math.inf)
        return Block(mask.to(dtype), False, self.scale)
