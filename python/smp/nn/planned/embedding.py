"""Tables of which a rank holds some rows, in the place of those of the model's own code."""

from __future__ import annotations

from torch import Tensor, nn

from smp.nn.planned.linear import PlannedPart
from smp.tensor_parallel import reading, regions, sharding


class PlannedTableRows(PlannedPart, nn.Embedding):
    """``nn.Embedding`` with some of the rows: ``embedding_rowwise``."""

    @reading.own_code
    def forward(self, input: Tensor) -> Tensor:
        """``[*]`` of integers to ``[*, embedding_dim]``. Collective."""
        ids = input if input.dim() > 0 else input[None]
        if self._has_own:
            ids = regions.gather(ids, 0, grad="own")
        begin = sharding.begin_of(self._smp_sizes)
        rows = regions.vocabulary_embedding(ids, self.weight, begin, self.padding_idx)
        rows = regions.reduce_scatter(rows, 0) if self._has_own else regions.reduce(rows)
        return rows if input.dim() > 0 else rows[0]
