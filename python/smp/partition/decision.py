"""The decision on the partition of a model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

import smp._C as _C
from smp.partition.fastest import Candidate
from smp.partition.tree import ModuleIndex
from smp.tensor_parallel.sharding import whole_shape

_MAX_STAGES = 3
_MAX_CHARACTERS = 120  # length of the names in a line
#: A line of `Decision.text`.
_LINE = re.compile(r"pp_rank (\d+)(?: chunk (\d+))?: (\d+) bytes \((\d+\.\d) %\): (.*)")


def _stage_words(line: str, ranks: Sequence[str]) -> str:
    match = _LINE.fullmatch(line)
    assert match is not None, line
    pp_rank, chunk, num_bytes = (int(part or 0) for part in match.groups()[:3])
    names = match[5].replace("(root)", "the model itself")
    names = re.sub(r"\(([^()]+)\)", r"\1 itself", names.replace("(no modules)", "no modules"))
    if len(names) > _MAX_CHARACTERS:
        names = names[: _MAX_CHARACTERS - 4] + " ..."
    stage, own = chunk * len(ranks) + pp_rank, ranks[pp_rank]
    plural = "" if own.isdecimal() else "s"
    return (
        f"stage {stage} on rank{plural} {own}: {num_bytes / 2**20:.2f} MiB of parameters, "
        f"{float(match[4]):.0f} % of all: {names}"
    )


@dataclass(frozen=True)
class Decision:
    """The owners of all modules. Decisions are equal on all ranks, see `agree`.

    Attributes:
        index: modules, names and ties; the sequences below are indexed by its nodes.
        num_partitions: number of pipeline ranks.
        partition_idxs: partition per module.
        load_bytes: parameter bytes per partition.
        text: lines for the log, beginning with ``Partition assignments:``.
        hash: 64 bits of names, partitions and chunks.
        num_chunks: stages per rank.
        chunk_idxs: chunk per module; empty if there is one chunk only.
        options: options that it was decided and is explained by; None on ranks that only follow.
        decided_by: "auto", "marks" or "file".
        step_ratio: estimated time of a step over that of ranks which are always and equally busy;
            None if the shortest step was not searched.
        considered: partitions of which the fastest was taken; empty if it was not searched.
    """

    index: ModuleIndex
    num_partitions: int
    partition_idxs: tuple[int, ...]
    load_bytes: tuple[int, ...]
    text: str
    hash: int
    num_chunks: int = 1
    chunk_idxs: tuple[int, ...] = ()
    options: _C.PartitionOptions | None = None
    decided_by: str = "auto"
    step_ratio: float | None = None
    considered: tuple[Candidate, ...] = ()

    def words(self, ranks: Sequence[str]) -> list[str]:
        """Returns a line for each stage, three at most, for the log of a run.

        Args:
            ranks: numbers of the global ranks of each pipeline rank, as text.
        """
        lines = [_stage_words(line, ranks) for line in self.text.splitlines()[1:]]
        if len(lines) <= _MAX_STAGES:
            return lines
        more = f"and {len(lines) - 2} stages between; smp.explain_partition() has all of them"
        return [lines[0], more, lines[-1]]

    @classmethod
    def of(
        cls,
        index: ModuleIndex,
        assignment: _C.Assignment,
        options: _C.PartitionOptions | None = None,
        decided_by: str = "auto",
    ) -> Decision:
        """Makes a decision from the partitioner's result and the modules that it is for."""
        return cls(
            index=index,
            num_partitions=assignment.num_partitions,
            partition_idxs=tuple(assignment.partition_idxs),
            load_bytes=tuple(assignment.load_bytes),
            text=assignment.to_text(index.tree),
            hash=assignment.hash,
            num_chunks=assignment.num_chunks,
            chunk_idxs=tuple(assignment.chunk_idxs) if assignment.num_chunks > 1 else (),
            options=options,
            decided_by=decided_by,
        )

    @cached_property
    def assignment(self) -> _C.Assignment:
        """Returns the decision in the form of the partitioner."""
        return _C.make_assignment(
            self.index.tree,
            self.num_partitions,
            self.partition_idxs,
            self.num_chunks,
            self.chunk_idxs,
        )

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Returns the distinct modules, parents first; the root is at 0."""
        return self.index.modules

    @cached_property
    def names(self) -> list[str]:
        """Returns the first qualified name of each module; "" is the root."""
        return [names[0] for names in self.index.names]

    @cached_property
    def partition_of(self) -> dict[nn.Module, int]:
        """Returns partitions by module."""
        return dict(zip(self.index.modules, self.partition_idxs, strict=True))

    @cached_property
    def partition_of_name(self) -> dict[str, int]:
        """Returns partitions by qualified name; all names of a module are included."""
        return {
            name: partition_idx
            for names, partition_idx in zip(self.index.names, self.partition_idxs, strict=True)
            for name in names
        }

    @cached_property
    def lines(self) -> list[str]:
        """Returns lines that ranks must agree on: modules with places, parameters with shapes."""
        lines = [f"{name or '(root)'} on {p}" for name, p in self.partition_of_name.items()]
        if self.num_chunks > 1:
            chunks = zip(self.names, self.chunk_idxs, strict=True)
            lines += [f"{name or '(root)'} in chunk {chunk}" for name, chunk in chunks]
        for name, parameter in self.modules[0].named_parameters():
            lines.append(f"{name} {tuple(whole_shape(parameter))} {parameter.dtype}")
        return lines

    @cached_property
    def digest(self) -> bytes:
        """Returns the hash of `lines`."""
        return hashlib.sha256("\n".join(self.lines).encode()).digest()

    @cached_property
    def later_stages(self) -> list[int]:
        """Returns modules with state of partition 0 that are not in its first chunk."""
        return [
            idx
            for idx, (partition_idx, chunk) in enumerate(
                zip(self.partition_idxs, self.chunk_idxs, strict=False)
            )
            if partition_idx == 0 and chunk > 0 and not self.index.is_stateless[idx]
        ]

    def depth_of(self, partition_idx: int) -> int:
        """Returns how many partitions the data pass before this one, in the order of modules."""
        met = list(dict.fromkeys(idx for idx in (0, *self.owner_partitions) if idx is not None))
        return met.index(partition_idx) if partition_idx in met else len(met)

    @cached_property
    def owner_partitions(self) -> list[int | None]:
        """Returns the partition that runs each module; None for those without state."""
        return [
            None if stateless else partition_idx
            for stateless, partition_idx in zip(
                self.index.is_stateless, self.partition_idxs, strict=True
            )
        ]
