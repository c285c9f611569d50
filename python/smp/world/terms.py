"""Values on which the ranks of one model have to agree beside the batch.

Hyperparameters of optimizers, and the factor by which the script has scaled gradients, are sent
with other messages: at the beginning of steps, and in roll calls, before results of an update
leave the job.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

import smp._C as _C
from smp.world import runtime
from smp.world.attached import Scaling

_TOLERANCE = 1e-9  # machines may compute numbers differently
_SAME_NUMBERS = (
    "Set the same value on all ranks: give schedulers that follow a loss (ReduceLROnPlateau) the "
    "mean over ranks (smp.allgather, or an all-reduce of torch.distributed)"
)
_SAME_GROUPS = "Make the same parameter groups on all ranks"
_SAME_NORM = (
    "A norm of one rank's part differs from rank to rank: clip by "
    "smp.clip_grad_norm_(model.parameters(), max_norm), or take smp.grad_norm for the norm"
)


class Terms:
    """Compares values of this rank with those of other ranks.

    Args:
        current: the runtime.
        where: words for what the ranks do when they compare, for errors.
        scaling: scaling of the gradients by the script, or None.

    Attributes:
        words: text for the other ranks.
    """

    def __init__(self, current: runtime.Runtime, where: str, scaling: Scaling | None) -> None:
        self._rank = current.rank
        self._where = where
        self._scaling = scaling
        self._factor = None if scaling is None else scaling.factor
        self._optimizers = _optimizers_of(current)
        self.words = json.dumps({"optimizers": self._optimizers, "factor": self._factor})

    def digests(self) -> list[int]:
        """Returns two numbers whose maxima over ranks belong together only if the ranks agree."""
        factor = "" if self._factor is None else f"{self._factor:.3g}"
        digest = zlib.crc32((self._optimizers + factor).encode())
        return [digest, -digest]

    def compare(self, told: Mapping[int, str]) -> None:
        """Compares ranks of one model.

        Pipeline ranks may have parameter groups of their own, which cannot be compared.

        Args:
            told: words of the ranks, by global rank.

        Raises:
            ValueError: they differ in a value on which ranks of one model have to agree.
        """
        if len(set(told.values())) < 2:
            return
        parsed = {rank: json.loads(words) for rank, words in told.items()}
        self._refuse_factors({rank: each["factor"] for rank, each in parsed.items()})
        optimizers = {rank: json.loads(each["optimizers"]) for rank, each in parsed.items()}
        replicas: dict[int, list[int]] = {}
        for rank in told:
            replicas.setdefault(self._rank.grid.coordinates(rank).pp, []).append(rank)
        for ranks in replicas.values():
            self._compare_each({rank: optimizers[rank] for rank in ranks})
        firsts = [ranks[0] for ranks in replicas.values()]
        self._compare_each({rank: optimizers[rank] for rank in firsts}, only_alike=True)

    def _compare_each(
        self, optimizers: Mapping[int, Mapping[str, Any]], only_alike: bool = False
    ) -> None:
        first = next(iter(optimizers.values()))
        for label, (first_sizes, _) in first.items():
            having = {r: groups[label] for r, groups in optimizers.items() if label in groups}
            if only_alike:
                having = {r: groups for r, groups in having.items() if groups[0] == first_sizes}
            elif len(having) < len(optimizers):
                continue  # garbage is collected at any time
            self._refuse(label, having)

    def _refuse(self, label: str, having: Mapping[int, Any]) -> None:
        """Raises if groups of one optimizer, or a number in a group, differ between ranks."""
        first_sizes, first_groups = next(iter(having.values()))
        for sizes, groups in having.values():
            if sizes != first_sizes:
                what = f"the tensors of each parameter group of optimizer {label}"
                self._raise(what, having, [sizes for sizes, _ in having.values()], _SAME_GROUPS)
            for idx, (first, group) in enumerate(zip(first_groups, groups, strict=True)):
                for name in first.keys() & group.keys():
                    if not _alike(first[name], group[name], _TOLERANCE):
                        what = f"'{name}' of parameter group {idx} of optimizer {label}"
                        values = [groups[idx].get(name) for _, groups in having.values()]
                        self._raise(what, having, values, _SAME_NUMBERS)

    def _refuse_factors(self, factors: Mapping[int, float | None]) -> None:
        own = self._scaling
        if own is None:
            return
        given = factors.values()
        if any(f is not None and not _alike(f, own.factor, own.tolerance) for f in given):
            what = (
                "the factor by which the script has multiplied gradients in the step before "
                f"{self._where}, after {own.place} has computed a number from them"
            )
            self._raise(what, factors, list(given), _SAME_NORM)

    def _raise(
        self, what: str, ranks: Mapping[int, Any], values: Sequence[Any], remedy: str
    ) -> None:
        shown = ", ".join(
            f"{value} on global rank {rank}" for rank, value in zip(ranks, values, strict=True)
        )
        raise ValueError(
            f"{_C.rank_prefix()}ranks that train one model disagree on {what}: {shown}. {remedy}"
        )


def terms_now(current: runtime.Runtime, where: str) -> Terms:
    """Returns the terms between two steps; they include the scaling of the last gradients."""
    keeper = current.part_gradients
    return Terms(current, where, None if keeper is None else keeper.scaling())


def _optimizers_of(current: runtime.Runtime) -> str:
    """Returns sizes and hyperparameters of the groups of all optimizers that update something.

    Returns:
        JSON: by number and class of an optimizer, tensors per group and values per group.
    """
    numbered = [("", current.wrapped.updating())]
    if current.torch_optimizers is not None:
        numbered.append((", not wrapped", list(current.torch_optimizers.own.items())))
    terms = {}
    for addition, optimizers in numbered:
        for number, optimizer in optimizers:
            groups = list(map(dict, optimizer.param_groups))
            sizes = [len(group.pop("params")) for group in groups]
            terms[f"{number} ({type(optimizer).__name__}{addition})"] = sizes, groups
    return json.dumps(terms, default=_plain, skipkeys=True)


def _plain(value: Any) -> Any:
    """Returns a number that lies on the host as a Python number; None for what is not compared."""
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
