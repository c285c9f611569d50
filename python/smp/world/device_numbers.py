"""Numbers that decide on an update. They stay on the device until somebody asks for them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

import smp._C as _C
from smp.world.rank import Rank


def gather(rank: Rank, numbers: Tensor, kind: str) -> Tensor:
    """Numbers of all ranks of a group. Collective over it, outside of step functions.

    The host waits for nothing that a device does, unless ranks share a GPU (``SMP_SHARE_GPU``),
    where what pipeline ranks tell each other goes through the host.

    Args:
        rank: that calls.
        numbers: floating point ``[n]``, on the device of this rank.
        kind: of the caller's group: "mp", "tp", "shard" or "replica".

    Returns:
        ``[size of the group, n]``, in order of rank.
    """
    if rank.sizes[kind] == 1:
        return numbers[None]
    what = f"exchange of numbers of an update ({kind})"
    rank.check_process(what)
    comms = rank.comms
    communicators = {
        "mp": comms.mp,
        "tp": comms.tp,
        # The reducers are done with these when a step is over.
        "shard": comms.shard_reduce,
        "replica": comms.replica,
    }
    communicator = communicators[kind]
    assert communicator is not None
    on_host = kind == "mp" and comms.mp_is_on_host
    gathered = _C.gather_numbers(
        numbers.cpu() if on_host else numbers,
        communicator,
        what=what,
        faults=rank.board,
        ranks=list(rank.groups[kind]),
        timeout_s=rank.timeout_s,
    )
    return moved(gathered, numbers.device)


def sums(rank: Rank, numbers: Tensor, kinds: Iterable[str]) -> Tensor:
    """Sums over groups, one after the other. Collective as `gather`.

    In order of rank, so that all ranks get the same bits.

    Args:
        rank: that calls.
        numbers: floating point ``[n]``.
        kinds: of groups.
    """
    for kind in kinds:
        gathered = gather(rank, numbers, kind)
        # The last of the partial sums: how `sum` puts terms together depends on their number.
        numbers = gathered.cumsum(0)[-1] if len(gathered) > 1 else numbers
    return numbers


def maxima(rank: Rank, numbers: Tensor, kinds: Iterable[str]) -> Tensor:
    """The largest over groups, NaN if there is one. Otherwise as `sums`."""
    for kind in kinds:
        numbers = gather(rank, numbers, kind).amax(0)
    return numbers


def skipping_kinds(rank: Rank) -> tuple[str, ...]:
    """Groups whose ranks, taken together, apply an update or skip it."""
    return ("mp", "shard", "replica") if rank.sizes["shard"] > 1 else ("mp",)


def number(value: float, device: torch.device) -> Tensor:
    """A number on a device, float64 without dimensions; nobody waits for it."""
    return torch.full((), value, dtype=torch.float64, device=device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; only a copy to the CPU is waited for."""
    return tensor.to(device, non_blocking=device.type != "cpu")


class DeviceFlag:
    """Yes or no. The device knows; the host waits for it, once, when somebody asks.

    Args:
        number: one number that nobody writes to, not 0 for yes; None: no.
    """

    def __init__(self, number: Tensor | None = None) -> None:
        self.number = number
        self._value: bool | None = None if number is not None else False

    def __bool__(self) -> bool:
        if self._value is None:
            assert self.number is not None
            self._value = self.number.item() != 0
        return self._value
