"""Numbers the samples of a microbatch within the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BatchTable:
    """The batch of one step, over all ranks that read a part of it.

    Attributes:
        seed: seed of the step.
        sizes: number of samples and of microbatches of each part, in the order of the data-parallel
            ranks; 0 samples if the number is not known.
    """

    seed: int
    sizes: tuple[tuple[int, int], ...]

    def ids(self, part: int, mb: int) -> range:
        """Returns the numbers of a microbatch's samples among those of the whole batch.

        Args:
            part: number of the part.
            mb: number of the microbatch in that part.
        """
        num_samples, count = self.sizes[part]
        # Cuts as torch.tensor_split does.
        size, more = divmod(num_samples, count)
        begin = sum(samples for samples, _ in self.sizes[:part]) + mb * size + min(mb, more)
        return range(begin, begin + size + (mb < more))


@dataclass(frozen=True)
class Samples:
    """The samples that a rank computes with, in their order within tensors.

    Attributes:
        table: batch of the step.
        parts: numbers of the parts that the ranks of this rank's tensor-parallel group read.
        own: index of this rank's part in ``parts``.
        mb: number of the microbatch.
        why_not: reason why dropout is refused here, and the remedy; empty if it is allowed.
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
        """Returns the numbers of the samples.

        Args:
            of_group: whether to list the samples of all ranks of the tensor-parallel group, one
                rank after the other, instead of this rank's.
        """
        found = self._ids.get(of_group)
        if found is None:
            parts = self.parts if of_group else [self.parts[self.own]]
            found = [idx for part in parts for idx in self.table.ids(part, self.mb)]
            self._ids[of_group] = found
        return found
