"""Finds the partition of modules, for those that must be on one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

import smp._C as _C
from smp.modules.forwards import WrapperKind, is_wrapped
from smp.partition.decision import Decision
from smp.world.log import first_rank_log


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
    """Stores where the modules of a partitioned model live."""
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


def is_placed(module: nn.Module) -> bool:
    """Returns whether the place of a module is known."""
    return module in _places


def place_of(module: nn.Module) -> tuple[int, int]:
    """Returns partition and chunk of a module; (0, 0) before the model is partitioned."""
    place = _places.get(module)
    return (0, 0) if place is None else (place.partition, place.chunk)


def is_together(module: nn.Module, instead: str = "it runs without checkpointing") -> bool:
    """Returns whether all of a module is on one partition; raises or warns if it is not.

    Args:
        module: module to make one checkpoint of.
        instead: the consequence otherwise, in words, for the warning.

    Raises:
        ValueError: the user has placed the module on several partitions.
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
        first_rank_log.warning("smp: %s; %s", what, instead)
    return False


def whole_or_parts(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the modules to checkpoint: whole ones, and the parts of those that are cut.

    A cut through a module leaves parts that are on one partition. Parts without modules of their
    own are left out: they keep little more than their arguments in any case.

    Raises:
        ValueError: the user placed one of the modules on several partitions.
    """
    found: list[nn.Module] = []
    for module in modules:
        if is_together(module, "its parts are checkpointed one by one"):
            found.append(module)
        else:
            found += _parts_of(module)
    return found


def _parts_of(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not any(True for _ in child.children()) or is_wrapped(child, WrapperKind.CHECKPOINT):
            continue
        is_called = type(child).forward is not nn.Module.forward
        if is_called and len(_partitions_of(child.modules())) < 2:
            if any(True for _ in child.parameters()):
                yield child
        else:
            yield from _parts_of(child)


def _partitions_of(modules: Iterable[nn.Module]) -> set[int]:
    places = [_places[module] for module in modules if module in _places]
    return {place.partition for place in places if not place.is_stateless}
