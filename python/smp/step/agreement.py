"""What ranks have to agree on where a step that trains begins.

Hyperparameters of optimizers, and the factor by which the script has scaled gradients, travel with
what ranks tell each other in any case: from the first rank of a pipeline with the number of its
microbatches, between replicas as a digest beside theirs. So does the shape of the batch, which is
compared and logged only, because the batch of the first pipeline rank counts.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import smp._C as _C
from smp.world import comm, runtime
from smp.world.log import first_rank_log

_log = logging.getLogger("smp")
_TOLERANCE = 1e-9  # machines may compute numbers differently
_SAMPLE_BYTES = 1 << 16
_MOST_TENSORS = 32
_SAME_NUMBERS = (
    "Set it alike on all ranks: give schedulers that follow a loss (ReduceLROnPlateau) one number "
    "for all of them, the mean over ranks (smp.allgather, or an all-reduce of torch.distributed)"
)
_SAME_GROUPS = "Make the same parameter groups on all ranks"
_SAME_NORM = (
    "A norm of one rank's part differs from rank to rank: clip by "
    "smp.clip_grad_norm_(model.parameters(), max_norm), or take smp.grad_norm for the norm"
)


class Agreement:
    """Compares what this rank has with what the other ranks have.

    Args:
        current: the runtime.
        name: of the step function.
        batch: arguments of the step function that are cut, by name.
    """

    def __init__(self, current: runtime.Runtime, name: str, batch: Mapping[str, Any]) -> None:
        self._current = current
        self._name = name
        current.steps.refuse_missed()
        keeper = current.part_gradients
        self._scaling = None if keeper is None else keeper.step_begins()
        self._terms = _terms_of(current)
        self._batch = self._shapes_of(batch) if current.rank.sizes["pp"] > 1 else {}

    def words(self) -> str:
        """Text for the other ranks of the pipeline."""
        return json.dumps({"terms": self._terms, "factor": self._factor(), "batch": self._batch})

    def _factor(self) -> float | None:
        return None if self._scaling is None else self._scaling.factor

    def digests(self) -> list[int]:
        """Two numbers whose maxima over ranks belong together only if the ranks agree."""
        factor = "" if self._scaling is None else f"{self._scaling.factor:.3g}"
        digest = zlib.crc32((self._terms + factor).encode())
        return [digest, -digest]

    def compare_pipeline(self, words: str) -> None:
        """Compares with the first rank of the pipeline.

        Args:
            words: text of that rank.

        Raises:
            ValueError: they differ in something that ranks of one model have to agree on.
        """
        first = json.loads(words)
        ranks = (self._current.rank.groups["pp"][0], self._current.rank.global_rank)
        self._refuse_factors(ranks, [first["factor"], self._factor()])
        if first["terms"] != self._terms:
            theirs, own = json.loads(first["terms"]), json.loads(self._terms)
            for label in theirs.keys() & own.keys():
                # Ranks of a pipeline may have groups of their own parameters, not comparable ones.
                if own[label][0] == theirs[label][0]:
                    self._refuse(label, ranks, [theirs[label], own[label]])
        self._tell_of_batch(first["batch"])

    def compare_replicas(self, maxima: Sequence[int]) -> None:
        """Compares over the data-parallel group. Collective over it if the digests differ.

        Args:
            maxima: of the digests, over the group.

        Raises:
            ValueError: on every rank, if they differ in something that ranks have to agree on.
        """
        if maxima[0] == -maxima[1]:
            return
        told = comm.allgather((self._terms, self._factor()), comm.CommGroup.DP_GROUP)
        ranks = self._current.rank.groups["dp"]
        self._refuse_factors(ranks, [factor for _, factor in told])
        parsed = [json.loads(terms) for terms, _ in told]
        for label in parsed[0]:
            having = [terms[label] for terms in parsed if label in terms]
            if len(having) == len(told):  # garbage is collected at any time
                self._refuse(label, ranks, having)

    def _refuse(self, label: str, ranks: Sequence[int], told: Sequence[Any]) -> None:
        """Raises if ranks have other groups, or another number in one, in the same optimizer."""
        first_sizes, first_groups = told[0]
        for sizes, groups in told:
            if sizes != first_sizes:
                what = f"the tensors of each parameter group of optimizer {label}"
                self._raise(what, ranks, [sizes for sizes, _ in told], _SAME_GROUPS)
            for idx, (first, group) in enumerate(zip(first_groups, groups, strict=True)):
                for name in first.keys() & group.keys():
                    if not _alike(first[name], group[name], _TOLERANCE):
                        what = f"'{name}' of parameter group {idx} of optimizer {label}"
                        values = [groups[idx].get(name) for _, groups in told]
                        self._raise(what, ranks, values, _SAME_NUMBERS)

    def _refuse_factors(self, ranks: Sequence[int], factors: Sequence[float | None]) -> None:
        if self._scaling is None:
            return
        own = self._scaling
        if any(f is not None and not _alike(f, own.factor, own.tolerance) for f in factors):
            what = (
                "the factor by which the script has multiplied gradients in the step before "
                f"'{self._name}', after {own.place} has computed a number from them"
            )
            self._raise(what, ranks, factors, _SAME_NORM)

    def _raise(self, what: str, ranks: Sequence[int], values: Sequence[Any], remedy: str) -> None:
        shown = ", ".join(
            f"{value} on global rank {rank}" for rank, value in zip(ranks, values, strict=True)
        )
        raise ValueError(
            f"{_C.rank_prefix()}ranks that train one model disagree on {what}: {shown}. {remedy}"
        )

    # ---- the batch

    def _shapes_of(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Shapes of tensors with elements, by place; with a digest of values in the first step."""
        leaves = [
            (name + pytree.keystr(path), leaf)
            for name, value in batch.items()
            for path, leaf in pytree.tree_flatten_with_path(value)[0]
            if isinstance(leaf, Tensor) and leaf.numel() and leaf.layout == torch.strided
        ][:_MOST_TENSORS]
        with_values = not self._current.steps.has_trained
        return {
            place: [list(leaf.shape), _digest(leaf) if with_values else 0] for place, leaf in leaves
        }

    def _tell_of_batch(self, first: Mapping[str, Any]) -> None:
        """Logs once that the batch of this rank is another one than that of the first rank."""
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


def _terms_of(current: runtime.Runtime) -> str:
    """Sizes and hyperparameters of the groups of all optimizers that update something here.

    Returns:
        JSON: by number and class of an optimizer, tensors per group and values per group.
    """
    numbered = [
        (f"{number} ({type(optimizer).__name__})", optimizer.param_groups)
        for number, optimizer in current.wrapped.updating()
    ]
    if current.torch_optimizers is not None:
        numbered += [
            (f"{number} ({type(optimizer).__name__}, not wrapped)", optimizer.param_groups)
            for number, optimizer in current.torch_optimizers.own()
        ]
    terms = {
        label: (
            [len(group["params"]) for group in groups],
            [{k: v for k, v in group.items() if k != "params"} for group in groups],
        )
        for label, groups in numbered
    }
    return json.dumps(terms, default=_plain, skipkeys=True)


def _plain(value: Any) -> Any:
    """A number of the host that is no number of Python; None for what is not compared."""
    is_on_host = not isinstance(value, Tensor) or value.device.type == "cpu"
    is_one = getattr(value, "size", 0) == 1 or (isinstance(value, Tensor) and value.numel() == 1)
    return value.item() if is_one and is_on_host else None


def _alike(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_alike(a, b, tolerance) for a, b in pairs)
    if isinstance(one, int | float) and isinstance(other, int | float):
        both_nan = one != one and other != other
        return both_nan or abs(one - other) <= tolerance * max(abs(one), abs(other)) or one == other
    return bool(one == other)


def _digest(tensor: Tensor) -> int:
    """Digest of the first values; 0 where all are equal, as in dummies. Waits for a device."""
    flat = tensor.detach().reshape(-1)
    sample = flat[: _SAMPLE_BYTES // flat.element_size()].cpu().contiguous()
    if bool((sample == sample[0]).all()):
        return 0
    return zlib.crc32(sample.view(torch.uint8).numpy().tobytes())
