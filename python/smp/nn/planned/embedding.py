"""Tables of which a rank holds a part, in place of those of the model's own code."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from smp.nn.embedding import join_features
from smp.nn.layout import uneven
from smp.nn.planned.linear import PlannedPart
from smp.tensor_parallel import reading, regions, sharding


class PlannedTableRows(PlannedPart, nn.Embedding):
    """An ``nn.Embedding`` with some of the rows: ``embedding_rowwise``."""

    @reading.own_code
    def forward(self, input: Tensor) -> Tensor:
        """Maps integers ``[*]`` to ``[*, embedding_dim]``. Collective."""
        ids = input if input.dim() > 0 else input[None]
        if self._has_own:
            ids = regions.gather(ids, 0, grad="own")
        begin = sharding.begin_of(self._smp_sizes)
        rows = regions.vocabulary_embedding(ids, self.weight, begin, self.padding_idx)
        # Copied, as models write features of images and sounds into the rows.
        rows = regions.reduce_scatter(rows, 0).clone() if self._has_own else regions.reduce(rows)
        return rows if input.dim() > 0 else rows[0]


class PlannedTableColumns(PlannedPart, nn.Embedding):
    """An ``nn.Embedding`` with some of the columns: ``embedding_colwise``."""

    @reading.own_code
    def forward(self, input: Tensor) -> Tensor:
        """Maps integers ``[*]`` to ``[*, embedding_dim]``. Collective."""
        ids = input if input.dim() > 0 else input[None]
        sizes, last = list(self._smp_sizes), ids.dim()
        if self._has_own:
            rows = F.embedding(regions.gather(ids, 0, grad="own"), self.weight, self.padding_idx)
            rows = join_features(rows, sizes, self._smp_layout)
        else:
            rows = F.embedding(ids, self.weight, self.padding_idx)
            rows = regions.gather(rows, last, uneven(sizes), grad="own")
        return rows if input.dim() > 0 else rows[0]
