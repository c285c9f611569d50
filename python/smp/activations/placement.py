"""On which partition modules live, for those that must be on one."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from smp import _C, runtime
from smp.partition.decide import Decision

_log = logging.getLogger("smp")


@dataclass(frozen=True)
class _Place:
    partition: int
    chunk: int
    is_stateless: bool
    by_hand: bool  # the user placed it
    name: str


_places: WeakKeyDictionary[nn.Module, _Place] = WeakKeyDictionary()
_warned: set[str] = set()


def note_placement(decision: Decision) -> None:
    """Remembers where the modules of a partitioned model live."""
    chunks = decision.chunk_idxs or (0,) * len(decision.modules)
    by_hand = decision.decided_by == "marks"
    for idx, module in enumerate(decision.modules):
        _places[module] = _Place(
            decision.partition_idxs[idx],
            chunks[idx],
            decision.index.is_stateless[idx],
            by_hand,
            decision.names[idx],
        )


def place_of(module: nn.Module) -> tuple[int, int]:
    """Partition and chunk of a module; (0, 0) before the partition, when nothing is apart."""
    place = _places.get(module)
    return (0, 0) if place is None else (place.partition, place.chunk)


def is_together(module: nn.Module) -> bool:
    """Is all of a module on one partition? If not, that is an error or a warning.

    Raises:
        ValueError: it is not, and the user has placed it so.
    """
    apart = _partitions_of(module.modules())
    if len(apart) < 2:
        return True
    place = _places[module]
    what = (
        f"module '{place.name or '(root)'}' ({type(module).__name__}) lies on the partitions "
        f"{sorted(apart)}, and a checkpointed module must lie on one"
    )
    if place.by_hand:
        raise ValueError(
            f"{_C.rank_prefix()}{what}; place all of it on one partition, or checkpoint modules "
            "inside of it"
        )
    if place.name not in _warned:
        _warned.add(place.name)
        if not runtime.is_initialized() or runtime.current().global_rank == 0:
            _log.warning("smp: %s; it runs without checkpointing", what)
    return False


def _partitions_of(modules: Iterable[nn.Module]) -> set[int]:
    places = [_places[module] for module in modules if module in _places]
    return {place.partition for place in places if not place.is_stateless}
