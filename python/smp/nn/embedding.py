"""Embeddings split over a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smp.nn import layout as layouts
from smp.nn.layout import Layout, uneven
from smp.nn.module import ReadAsWhole
from smp.nn.parameters import add_split, fill, split_or_refuse
from smp.tensor_parallel import reading, regions, sharding
from smp.tensor_parallel.registry import Unsupported


class DistributedEmbedding(ReadAsWhole):
    """An ``nn.Embedding``, split over the embedding dim.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of the whole table, at least the tensor-parallel degree.
        padding_idx: index of a row that starts as zero and gets no gradient.
        max_norm, norm_type: the same as in ``nn.Embedding``; with one rank only, because the norm
            of a row needs all of its columns.
        scale_grad_by_freq: the same as in ``nn.Embedding``; each batch of the group has its own
            frequencies.
        sparse: unsupported if True: gradients are summed over ranks as dense tensors.
        initializer_range: standard deviation of the initial table.
        _weight: the whole table, instead of an initial one.
        _skip_allgather: indices are those of all ranks already.
        _skip_scatter_and_merge: the result stays ``[all samples, *, own columns]``.

    Raises:
        Unsupported: ``sparse`` is True, ``max_norm`` is given with several ranks, or a rank would
            get no columns.
    """

    weight: nn.Parameter
    sparse = False  # adapters read it

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        initializer_range: float = 0.02,
        _skip_allgather: bool = False,
        _skip_scatter_and_merge: bool = False,
    ) -> None:
        super().__init__()
        self._layout = layouts.current()
        if sparse:
            raise Unsupported("sparse is True; gradients of distributed embeddings are dense")
        if max_norm is not None and self._layout.num_ranks > 1:
            raise Unsupported(f"max_norm is {max_norm}; a row is split over ranks, use None")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = _row_of(padding_idx, num_embeddings)
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self._std = initializer_range
        self._skip_allgather = _skip_allgather
        self._skip_scatter_and_merge = _skip_scatter_and_merge
        self._sizes = split_or_refuse(embedding_dim, "embedding_dim")
        add_split(self, "weight", [num_embeddings, embedding_dim], 1, self._sizes)
        if _weight is None:
            self.reset_parameters()
        else:
            if list(_weight.shape) != [num_embeddings, embedding_dim]:
                raise ValueError(
                    f"_weight has shape {list(_weight.shape)}; expected the whole table, "
                    f"{[num_embeddings, embedding_dim]}"
                )
            fill(self.weight, lambda t: t.copy_(_weight))

    def reset_parameters(self) -> None:
        """Initialises this rank's columns."""
        fill(self.weight, _normal_rows(self._std, self.padding_idx))

    @reading.own_code
    def forward(self, input: Tensor) -> Tensor:
        """Maps integers ``[*]`` to ``[*, embedding_dim]``. Collective over the group."""
        ids = input if input.dim() > 0 else input[None]
        if not self._skip_allgather:
            ids = self._layout.all_samples(ids)
        if self.scale_grad_by_freq and self._layout.has_own_batches:
            batches = ids.chunk(self._layout.num_ranks)
            rows = torch.cat([self._look_up(batch) for batch in batches])
        else:
            rows = self._look_up(ids)
        if not self._skip_scatter_and_merge:
            rows = join_features(rows, self._sizes, self._layout)
        return rows if input.dim() > 0 or self._skip_scatter_and_merge else rows[0]

    def _look_up(self, ids: Tensor) -> Tensor:
        """Returns this rank's columns of some rows."""
        return F.embedding(
            ids,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, local columns {self.weight.shape[1]}"
            + ("" if self.padding_idx is None else f", padding_idx={self.padding_idx}")
        )


class VocabularyEmbedding(nn.Module):
    """A table whose rows are split over ranks; looks up into the layout of a stack.

    Args:
        vocab_size: rows of the whole table.
        hidden_size: columns of the table.
        std: standard deviation of the initial table.
        layout: layout of the result.

    Raises:
        Unsupported: a rank would get no rows.
    """

    weight: nn.Parameter

    def __init__(self, vocab_size: int, hidden_size: int, std: float, layout: Layout) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self._std, self._layout = std, layout
        sizes = split_or_refuse(vocab_size, "vocab_size")
        self._begin = sharding.begin_of(sizes)
        add_split(self, "weight", [vocab_size, hidden_size], 0, sizes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises this rank's rows."""
        fill(self.weight, lambda t: t.normal_(0.0, self._std))

    def forward(self, ids: Tensor) -> Tensor:
        """Maps ``[B, S]`` to ``[B, S, hidden_size]`` in the layout. Collective over the group."""
        every = self._layout.all_samples(ids)
        order = self._layout.order_of(every)
        if order is not None:
            every = order.blocks(every)
        rows = regions.vocabulary_embedding(every, self.weight, self._begin)
        return self._layout.sum_up(rows, ids.shape[1], order)

    def extra_repr(self) -> str:
        return f"{self.vocab_size}, {self.hidden_size}, local rows {self.weight.shape[0]}"


class WholeEmbedding(nn.Embedding):
    """A small table that every rank holds, for positions and token types.

    Args:
        num_embeddings, embedding_dim: rows and columns of the table.
        std: standard deviation of the initial table.
        layout: layout of the rows that are looked up.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float, layout: Layout) -> None:
        self._std = std
        super().__init__(num_embeddings, embedding_dim)
        layout.mark_whole(self)

    def reset_parameters(self) -> None:
        """Draws the table from a normal distribution."""
        fill(self.weight, lambda t: t.normal_(0.0, self._std))


def _row_of(padding_idx: int | None, num_rows: int) -> int | None:
    """Returns the row of an index, which counts from the end if negative.

    Raises:
        ValueError: the table has no such row.
    """
    if padding_idx is None:
        return None
    if not -num_rows <= padding_idx < num_rows:
        raise ValueError(f"padding_idx is {padding_idx}, which is no row of {num_rows} embeddings")
    return padding_idx % num_rows


def _normal_rows(std: float, zero_row: int | None) -> Callable[[Tensor], None]:
    """Returns a function that fills a whole table; one row may be zero."""

    def draw(table: Tensor) -> None:
        table.normal_(0.0, std)
        if zero_row is not None:
            table[zero_row].zero_()

    return draw


def join_features(x: Tensor, sizes: list[int], layout: Layout) -> Tensor:
    """Turns ``[all samples, *, own features]`` into ``[own samples, *, all features]``.

    Args:
        x: tensor of this rank.
        sizes: numbers of features, by rank.
        layout: layout that determines which samples a rank's caller holds.
    """
    last = x.dim() - 1
    if layout.has_own_batches:
        return regions.exchange(x, 0, last, concat_sizes=uneven(sizes))
    return regions.gather(x, last, uneven(sizes), grad="own")
