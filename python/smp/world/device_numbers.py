"""Makes the numbers that decide on an update; the host reads them only when it needs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

import smp._C as _C
from smp.world.rank import Rank

Ranks = tuple[int, ...]


def gather(rank: Rank, numbers: Tensor, kind: str) -> Tensor:
    """Gathers numbers of all ranks of a group. Collective over it, outside of step functions.

    The host does not wait for the device, unless ranks share a GPU (``SMP_SHARE_GPU``): then
    numbers of pipeline ranks are exchanged through the host.

    Args:
        rank: calling rank.
        numbers: floating point ``[n]``, on the device of this rank.
        kind: kind of the caller's group: "mp", "tp", "shard" or "replica".

    Returns:
        ``[size of the group, n]``, in order of rank.
    """
    if rank.sizes[kind] == 1:
        return numbers[None]
    what = f"exchange of numbers of an update ({kind})"
    between = rank.between
    if between is not None and between.is_repeated:
        return between.next(rank, kind)
    rank.check_process(what)
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
    on_host = kind == "mp" and comms.mp_is_on_host
    try:
        gathered = _C.gather_numbers(
            numbers.cpu() if on_host else numbers,
            communicator,
            what=what,
            faults=rank.board,
            ranks=list(rank.groups[kind]),
            timeout_s=rank.timeout_s,
        )
    except RuntimeError as error:
        if between is not None:
            _explain_loss(rank, error)
        raise
    if between is not None:
        between.gathered.append((rank.groups[kind], gathered.clone()))
    return moved(gathered, numbers.device)


def _explain_loss(rank: Rank, error: RuntimeError) -> None:
    """Raises the failure of another rank, if there is one, which is hidden between two steps."""
    board = rank.board
    if board is None or (fault := board.known_fault()) is None:
        return
    board.release()
    raise _C.PeerFailure(
        f"{rank.prefix}{fault[2]}. It had not computed a norm or checked gradients between two "
        "steps, for which the other ranks needed it; resume from a checkpoint"
    ) from error


class NumbersBetweenSteps:
    """The numbers that ranks have gathered since the last step.

    A process with the place of a lost rank repeats what the script does between two steps, and gets
    the numbers that the others have gathered with that rank.

    Args:
        repeated: numbers to be repeated, by the ranks of their group, as `numbers_of` finds them;
            None: the ranks gather them.

    Attributes:
        is_repeated: whether numbers are repeated.
        gathered: ranks and result of each gathering so far.
    """

    def __init__(self, repeated: Mapping[Ranks, Sequence[Tensor]] | None = None) -> None:
        self.is_repeated = repeated is not None
        self._left = {ranks: list(numbers) for ranks, numbers in (repeated or {}).items()}
        self.gathered: list[tuple[Ranks, Tensor]] = []

    def next(self, rank: Rank, kind: str) -> Tensor:
        """Returns the next numbers of a group.

        Args:
            rank: calling rank.
            kind: kind of the group.

        Raises:
            RuntimeError: the other ranks have gathered others.
        """
        left = self._left.get(rank.groups[kind])
        if not left:
            self._refuse(rank)
        self.gathered.append((rank.groups[kind], left.pop(0)))
        return self.gathered[-1][1]

    def end(self, rank: Rank) -> None:
        """Raises a RuntimeError if numbers that were to be repeated are left."""
        if any(self._left.values()):
            self._refuse(rank)

    def _refuse(self, rank: Rank) -> NoReturn:
        raise RuntimeError(
            f"{rank.prefix}this process repeats what the script does between two steps, and the "
            "other ranks have computed other norms there, or have checked gradients more often or "
            "less; let the content of smp.take_over lead to the step during which it was made"
        )


def numbers_of(
    global_rank: int, noted: Iterable[Iterable[tuple[Ranks, Tensor]]]
) -> dict[Ranks, list[Tensor]]:
    """Returns the numbers that a lost rank has gathered with others, by the ranks of each group.

    Each group has them from another member, since ranks that keep a copy may be in other groups.

    Args:
        global_rank: the lost rank.
        noted: notes of each rank that lives, as in `NumbersBetweenSteps.gathered`.
    """
    found: dict[Ranks, list[Tensor]] = {}
    for notes in noted:
        own: dict[Ranks, list[Tensor]] = {}
        for ranks, numbers in notes:
            if global_rank in ranks:
                own.setdefault(ranks, []).append(numbers)
        found |= {ranks: numbers for ranks, numbers in own.items() if ranks not in found}
    return found


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
