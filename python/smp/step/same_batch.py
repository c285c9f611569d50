"""Checks in each step that ranks which split the sequences of one batch have read the same one.

Each of them computes a part of each sequence, so other batches would give numbers that belong to no
batch, and no error anywhere. The ranks exchange one number before the step, of shapes, plain values
and tensors on the host. Checksums of tensors on a device are computed there, behind the work before
the step, and exchanged when it ends.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp._device import device_module, is_accelerator
from smp.step.checksum import checksum
from smp.step.readings import Path, entries, is_array, is_mapping
from smp.world import comm
from smp.world.rank import Rank

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_DEVICE = re.compile(r"[a-z]+:\d+")  # "cuda:1" differs from rank to rank
_MOST_SHOWN = 60  # characters of a value in an error


@dataclasses.dataclass(frozen=True)
class _Seen:
    """An argument, or an entry of one, as the other ranks have to have it.

    Attributes:
        form: dtype and shape of a tensor; the text of another value.
        checksum: checksum of a tensor on the host; None for others.
    """

    form: str
    checksum: int | None = None


class SameBatch:
    """The comparison of one step's arguments over the ranks of a cp group.

    Args:
        rank: rank of this process, in a cp group of more than one.
        name: name of the step function.
        arguments: arguments of the step function by name.
    """

    def __init__(self, rank: Rank, name: str, arguments: Mapping[str, Any]) -> None:
        self._rank, self._name = rank, name
        self._seen: dict[Path, _Seen] = {}
        self._late: list[Path] = []
        sums = []
        for path, value in _leaves(arguments, ()):
            self._seen[path] = _Seen(_form(value))
            if not _has_values(value):
                continue
            if is_accelerator(value.device):
                self._late.append(path)
                sums.append(checksum(value).to(rank.device))
            else:
                self._seen[path] = _Seen(_form(value), int(checksum(value)))
        self._sums = _Arriving(torch.stack(sums)) if sums else None

    def compare(self) -> None:
        """Compares what the host knows before the step. Collective over the cp group.

        Raises:
            ValueError: on all its ranks, if their arguments differ.
        """
        self._compare(self._seen)

    def compare_late(self) -> None:
        """Compares tensors of a device, if there are any. Collective over the cp group.

        Raises:
            ValueError: on all its ranks, if their arguments differ.
        """
        if self._sums is not None:
            late = zip(self._late, self._sums.numbers(), strict=True)
            self._compare({path: _Seen(self._seen[path].form, number) for path, number in late})

    def _compare(self, seen: Mapping[Path, _Seen]) -> None:
        rank = self._rank
        text = repr(sorted((path, one.form, one.checksum) for path, one in seen.items()))
        digest = hashlib.blake2b(text.encode(), digest_size=6).digest()  # exact in a float64
        assert rank.comms.cp_control is not None
        told = _C.gather_host_numbers(
            [float(int.from_bytes(digest, "big"))],
            rank.comms.cp_control,
            what="comparison of the batch",
            faults=rank.board,
            ranks=list(rank.groups["cp"]),
            timeout_s=rank.timeout_s,
        )
        if any(one != told[0] for one in told):
            self._refuse(comm.allgather(dict(seen), comm.CommGroup.CP_GROUP))

    def _refuse(self, told: Sequence[Mapping[Path, _Seen]]) -> None:
        rank, ranks = self._rank, self._rank.groups["cp"]
        by_rank = dict(zip(ranks, told, strict=True))
        paths = dict.fromkeys(path for seen in told for path in seen)
        path = next(p for p in paths if len({seen.get(p) for seen in told}) > 1)
        difference = _difference({rank: seen.get(path) for rank, seen in by_rank.items()})
        kind = "rdp" if rank.config.prescaled_batch and rank.sizes["tp"] > 1 else "dp"
        raise ValueError(
            f"{rank.prefix}step '{self._name}': argument '{'.'.join(path)}' {difference}. With "
            f"context_parallel_degree={len(ranks)} the ranks {list(ranks)} compute parts of the "
            "sequences of one batch, so each has to read the whole of it: make samplers with "
            f"num_replicas=smp.{kind}_size() and rank=smp.{kind}_rank(), and seed these ranks alike"
        )


class _Arriving:
    """Numbers of a device on their way to the host, which waits only when it reads them."""

    def __init__(self, numbers: Tensor) -> None:
        self._host = torch.empty_like(numbers, device="cpu", pin_memory=True)
        self._host.copy_(numbers, non_blocking=True)
        self._arrival = device_module(numbers.device).Event()
        self._arrival.record()

    def numbers(self) -> list[int]:
        """Returns the numbers."""
        self._arrival.synchronize()
        return [int(number) for number in self._host.tolist()]


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yields tensors, arrays and plain values in arguments; other objects are not compared."""
    if isinstance(value, (Tensor, set, frozenset, *_PLAIN)) or is_array(value):
        yield path, value
    elif is_mapping(value) or isinstance(value, list | tuple):
        if not is_mapping(value) and all(isinstance(entry, _PLAIN) for entry in value):
            yield path, value
            return
        for entry, inner in entries(value, path):
            yield from _leaves(entry, inner)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name, None), (*path, field.name))


def _has_values(value: Any) -> bool:
    """Returns whether a value is a tensor with memory that a checksum reads."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not (value.is_meta or value.is_quantized or value.is_nested)
    )


def _form(value: Any) -> str:
    """Returns a text that is equal on all ranks for equal values, or tensors of equal shapes."""
    if isinstance(value, Tensor):
        sizes = "" if value.is_nested else f" {list(value.shape)}"
        return f"{str(value.dtype).removeprefix('torch.')}{sizes}"
    if is_array(value):
        content = b"" if value.dtype == object else value.tobytes()
        digest = hashlib.blake2b(content, digest_size=6).hexdigest()
        return f"{value.dtype} {list(value.shape)} with digest {digest}"
    if isinstance(value, set | frozenset):
        return str(sorted(repr(entry) for entry in value if isinstance(entry, _PLAIN)))
    if isinstance(value, str) and _DEVICE.fullmatch(value):
        return "a device"
    return repr(value)


def _difference(by_rank: Mapping[int, _Seen | None]) -> str:
    """Returns words for the values of one argument, which differ, by global rank."""
    ranks: dict[str, list[int]] = {}
    for rank, seen in by_rank.items():
        ranks.setdefault("missing" if seen is None else seen.form, []).append(rank)
    if len(ranks) > 1:
        return "is " + ", ".join(
            f"{_short(form)} on global rank{'s' * (len(own) > 1)} {', '.join(map(str, own))}"
            for form, own in ranks.items()
        )
    (first, seen), *rest = by_rank.items()
    assert seen is not None
    others = [str(rank) for rank, other in rest if other != seen]
    return (
        f"({seen.form}) has other values on global rank{'s' * (len(others) > 1)} "
        f"{', '.join(others)} than on global rank {first}"
    )


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."
