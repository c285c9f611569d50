"""Which samples of the whole batch a microbatch has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BatchTable:
    """The batch of one step, over all ranks that read a part of it.

    Attributes:
        seed: of the step.
        sizes: number of samples and of microbatches of each part, in the order of the data-parallel
            ranks; 0 samples where nobody knows.
    """

    seed: int
    sizes: tuple[tuple[int, int], ...]

    def ids(self, part: int, mb: int) -> range:
        """Numbers of the samples of a microbatch among those of the whole batch.

        Args:
            part: number of the part.
            mb: microbatch of it.
        """
        num_samples, count = self.sizes[part]
        # As torch.tensor_split cuts.
        size, more = divmod(num_samples, count)
        begin = sum(samples for samples, _ in self.sizes[:part]) + mb * size + min(mb, more)
        return range(begin, begin + size + (mb < more))


@dataclass(frozen=True)
class Samples:
    """The samples that a rank computes with, in the order in which they lie in tensors.

    Attributes:
        table: of the step.
        parts: what the ranks of this rank's tensor-parallel group read.
        own: place of this rank's part among them.
        mb: microbatch.
        why_not: says why nothing may be dropped here, and what to do; empty: it may.
    """

    table: BatchTable
    parts: Sequence[int]
    own: int
    mb: int
    why_not: str = ""
    _ids: dict[bool, list[int]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def seed(self) -> int:
        return self.table.seed

    def ids(self, of_group: bool) -> list[int]:
        """Numbers of the samples.

        Args:
            of_group: of all ranks of the tensor-parallel group, one after the other, instead of
                this rank's.
        """
        found = self._ids.get(of_group)
        if found is None:
            parts = self.parts if of_group else [self.parts[self.own]]
            found = [idx for part in parts for idx in self.table.ids(part, self.mb)]
            self._ids[of_group] = found
        return found
