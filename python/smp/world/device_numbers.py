"""Makes the numbers that decide on an update; the host reads them only when it needs them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

import smp._C as _C
from smp.world.rank import Rank


def gather(rank: Rank, numbers: Tensor, kind: str) -> Tensor:
    """Gathers numbers of all ranks of a group. Collective over it, outside of step functions.

    The host does not wait for the device, unless ranks share a GPU (``SMP_SHARE_GPU``): then
    numbers of pipeline ranks are exchanged through the host. With ``redundancy`` a failure in it
    is no end: it goes on when a process has taken the place of the lost rank.

    Args:
        rank: calling rank.
        numbers: floating point ``[n]``, on the device of this rank.
        kind: kind of the caller's group: "mp", "tp", "shard" or "replica".

    Returns:
        ``[size of the group, n]``, in order of rank.
    """
    if rank.sizes[kind] == 1:
        return numbers[None]
    between = rank.between
    if between is None:
        rank.check_process(_what(kind))
        gathered = _gather(rank, numbers, kind)
    else:
        rank.check_run(_what(kind))
        gathered = between.gather(rank, kind, lambda: _gather(rank, numbers, kind))
    return moved(gathered, numbers.device)


def _what(kind: str) -> str:
    return f"exchange of numbers of an update ({kind})"


def _gather(rank: Rank, numbers: Tensor, kind: str) -> Tensor:
    comms = rank.comms
    communicators = {
        "mp": comms.mp,
        "tp": comms.tp,
        # The reducers use these only during a step.
        "shard": comms.shard_reduce,
        "replica": comms.replica,
    }
    communicator = communicators[kind]
    assert communicator is not None
    return _C.gather_numbers(
        numbers.cpu() if kind == "mp" and comms.mp_is_on_host else numbers,
        communicator,
        what=_what(kind),
        faults=rank.board,
        ranks=list(rank.groups[kind]),
        timeout_s=rank.timeout_s,
    )


def sums(rank: Rank, numbers: Tensor, kinds: Iterable[str]) -> Tensor:
    """Sums numbers over groups, one group after the other. Collective like `gather`.

    Terms are added in order of rank, so that all ranks get the same bits.

    Args:
        rank: calling rank.
        numbers: floating point ``[n]``.
        kinds: kinds of the groups.
    """
    for kind in kinds:
        gathered = gather(rank, numbers, kind)
        # Take the last partial sum: the order of terms in `sum` depends on their number.
        numbers = gathered.cumsum(0)[-1] if len(gathered) > 1 else numbers
    return numbers


def maxima(rank: Rank, numbers: Tensor, kinds: Iterable[str]) -> Tensor:
    """Returns maxima over groups, and NaN where a rank has NaN. Collective like `sums`."""
    for kind in kinds:
        numbers = gather(rank, numbers, kind).amax(0)
    return numbers


def skipping_kinds(rank: Rank) -> tuple[str, ...]:
    """Returns the kinds of groups whose ranks together apply an update or skip it."""
    return ("mp", "shard", "replica") if rank.sizes["shard"] > 1 else ("mp",)


def number(value: float, device: torch.device) -> Tensor:
    """Returns a float64 scalar on a device without waiting for the device."""
    return torch.full((), value, dtype=torch.float64, device=device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to a device; the host waits only for copies to the CPU."""
    return tensor.to(device, non_blocking=device.type != "cpu")


class DeviceFlag:
    """A boolean on a device; the host waits for it once, when it is first read.

    Args:
        number: scalar that is never written to again, true if not 0; None: false.
    """

    def __init__(self, number: Tensor | None = None) -> None:
        self.number = number
        self._value: bool | None = None if number is not None else False

    def __bool__(self) -> bool:
        if self._value is None:
            assert self.number is not None
            self._value = self.number.item() != 0
        return self._value
