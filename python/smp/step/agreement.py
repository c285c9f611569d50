"""Values on which ranks have to agree at the beginning of a step.

They are sent with other messages: from the first rank of a pipeline with the number of its
microbatches, between replicas as a digest beside theirs. So is the shape of a training batch. That
is compared and logged only, because the batch of the first pipeline rank counts.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp.step.cutting import Cutting
from smp.world import comm, runtime
from smp.world.log import first_rank_log
from smp.world.terms import Terms

_log = logging.getLogger("smp")
_SAMPLE_BYTES = 1 << 16
_MOST_TENSORS = 32


class Agreement:
    """Compares values of this rank with those of other ranks.

    Args:
        current: the runtime.
        name: name of the step function.
        cutting: arguments of the step function, or None to compare none.
        trains: whether the step trains, so that gradients of the step before are not used any more.

    Attributes:
        words: text for the other ranks of the pipeline.
    """

    def __init__(
        self, current: runtime.Runtime, name: str, cutting: Cutting | None, trains: bool
    ) -> None:
        self._current = current
        self._name = name
        shows = trains and cutting is not None and current.rank.sizes["pp"] > 1
        self._batch = self._shapes_of(cutting) if shows and cutting is not None else {}
        if trains and current.steps.missed_at is not None:
            current.steps.refuse_missed()
        keeper = current.part_gradients
        scaling = None
        if keeper is not None and not keeper.is_idle:
            scaling = keeper.scaling()
            if trains:
                keeper.step_begins()
        self._terms = Terms(current, f"'{name}'", scaling)
        self.words = json.dumps({"terms": self._terms.words, "batch": self._batch})

    def digests(self) -> list[int]:
        """Returns two numbers whose maxima over ranks belong together only if the ranks agree."""
        return self._terms.digests()

    def compare_pipeline(self, words: str) -> None:
        """Compares with the first rank of the pipeline.

        Args:
            words: text of that rank.

        Raises:
            ValueError: they differ in a value on which ranks of one model have to agree.
        """
        rank, first = self._current.rank, json.loads(words)
        told = {rank.groups["pp"][0]: first["terms"], rank.global_rank: self._terms.words}
        self._terms.compare(told)
        self._tell_of_batch(first["batch"])

    def compare_replicas(self, maxima: Sequence[int]) -> None:
        """Compares over the data-parallel group. Collective over it if the digests differ.

        Args:
            maxima: maxima of the digests over the group.

        Raises:
            ValueError: on every rank, if they differ in a value on which ranks have to agree.
        """
        if maxima[0] != -maxima[1]:
            told = comm.allgather(self._terms.words, comm.CommGroup.DP_CP_GROUP)
            self._terms.compare(dict(zip(self._current.rank.groups["dp_cp"], told, strict=True)))

    # ---- the batch

    def _shapes_of(self, cutting: Cutting) -> dict[str, Any]:
        """Returns shapes of tensors by place; in the first step also digests of values."""
        shapes: dict[str, Any] = {}
        with_values = not self._current.steps.has_trained
        for path, tensor, _ in cutting.along():
            if tensor.numel() and tensor.layout == torch.strided and len(shapes) < _MOST_TENSORS:
                digest = _digest(tensor) if with_values else 0
                shapes[".".join(path)] = [list(tensor.shape), digest]
        return shapes

    def _tell_of_batch(self, first: Mapping[str, Any]) -> None:
        """Logs once if the batch of this rank differs from that of the first rank."""
        rank = self._current.rank
        if rank.ranks["pp"] != 1 or rank.ranks["tp"] != 0:
            return
        for place in self._batch.keys() & first.keys():
            (shape, digest), (other_shape, other_digest) = self._batch[place], first[place]
            if shape == other_shape and 0 in (digest - other_digest, digest, other_digest):
                continue
            if first_rank_log.is_new((self._name, "other batch")):
                what = (
                    f"shape {shape} here and {other_shape} there"
                    if shape != other_shape
                    else "other values here than there"
                )
                _log.warning(
                    "%sstep '%s': argument '%s' has %s, on global rank %d. Ranks of one pipeline "
                    "train on one batch, that of its first rank; what the step function computes "
                    "here from its own arguments (a loss from labels) belongs to other samples. "
                    "Give all ranks of a pipeline the same batches: shard data by "
                    "smp.dp_rank() and smp.dp_size(), with one seed. Dummies are fine where "
                    "nothing is computed from them",
                    _C.rank_prefix(),
                    self._name,
                    place,
                    what,
                    rank.groups["pp"][0],
                )
            return


def _digest(tensor: Tensor) -> int:
    """Returns a digest of the first values; 0 if all are equal. Waits for a device."""
    flat = tensor.detach().reshape(-1)
    sample = flat[: _SAMPLE_BYTES // flat.element_size()].cpu().contiguous()
    if bool((sample == sample[0]).all()):
        return 0
    return zlib.crc32(sample.view(torch.uint8).numpy().tobytes())
