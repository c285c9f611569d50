"""Decides which files to send, delete and load. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from smp.checkpoint.manifest import FILE_NAME
from smp.checkpoint.store.names import Key


@dataclass(frozen=True)
class Stored:
    """A generation in a store.

    Attributes:
        key: key of the generation.
        sizes: bytes of its objects by name, the manifest included.
        changed_s: time of its last change, by the clock of the store; 0: unknown.
    """

    key: Key
    sizes: Mapping[str, int]
    changed_s: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Returns whether all files have been sent: the manifest comes last."""
        return FILE_NAME in self.sizes


@dataclass(frozen=True)
class Holding:
    """The files of a generation that are in one place.

    Attributes:
        key: key of the generation.
        names: files that are there, without the manifest.
        total: number of files that the generation has; 0: unknown, because the place is the store
            and has no manifest.
    """

    key: Key
    names: list[str]
    total: int


def missing(wanted: Mapping[str, int], there: Mapping[str, int]) -> list[str]:
    """Returns files that are not in the store with all their bytes.

    Args:
        wanted, there: bytes by name.
    """
    return [name for name, num_bytes in wanted.items() if there.get(name) != num_bytes]


def shares(wanted: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """Returns the files that each rank sends: the largest first, each to the least loaded rank.

    All ranks see the folder of the files, so any rank can send any of them. So a job of another
    size can send the files that an earlier one has left.
    """
    totals = [0] * num_ranks
    result: list[list[str]] = [[] for _ in range(num_ranks)]
    for name in sorted(wanted, key=lambda name: (-wanted[name], name)):
        rank = totals.index(min(totals))
        result[rank].append(name)
        totals[rank] += wanted[name] + 1  # files without bytes are spread, too
    return result


def surplus(there: Iterable[str], wanted: Mapping[str, int]) -> list[str]:
    """Returns objects in a generation's folder that do not belong to it."""
    return sorted(name for name in there if name not in wanted and name != FILE_NAME)


def doomed(
    found: Iterable[Stored],
    done: Key,
    keep: int | None,
    held: Set[Key],
    now_s: float,
    quiet_s: float,
) -> list[Key]:
    """Returns the generations to delete after one has become complete.

    They are complete ones beyond the newest ``keep``, and incomplete ones that are older than the
    one completed now and have not changed for ``quiet_s``.

    Args:
        found: generations in the store.
        done: generation that has become complete; it stays.
        keep: number of complete generations that stay; None: all.
        held: generations that this job still sends or reads; they stay.
        now_s: time by the clock of the store, approximately, in seconds.
        quiet_s: seconds without a change after which an incomplete generation counts as dead.
    """
    found = list(found)
    complete = sorted(one.key for one in found if one.is_complete)
    too_many = [] if keep is None else complete[: max(0, len(complete) - max(1, keep))]
    dead = [
        one.key
        for one in found
        if not one.is_complete and one.key < done and now_s - one.changed_s > quiet_s
    ]
    return [key for key in sorted(too_many + dead) if key != done and key not in held]


def newest(found: Iterable[Key], tag: str | None, suffix: str) -> Key | None:
    """Returns the newest generation, or the newest of a tag, with or without its suffix."""
    names = None if tag is None else (tag, tag + suffix)
    return max((key for key in found if names is None or key.name in names), default=None)


def covered(holdings: Iterable[Holding]) -> set[Key]:
    """Returns the generations of which several places together have all files."""
    found: dict[Key, set[str]] = {}
    totals: dict[Key, int] = {}
    for one in holdings:
        found.setdefault(one.key, set()).update(one.names)
        totals[one.key] = max(one.total, totals.get(one.key, 0))
    return {key for key, names in found.items() if 0 < totals[key] == len(names)}


def choose(
    stored: Iterable[Key], local: Sequence[Iterable[Key]], tag: str | None, suffix: str
) -> tuple[Key, bool] | None:
    """Returns the newest generation in the store, or in the folder that every rank sees.

    Args:
        stored: complete generations in the store.
        local: complete generations in the folder, as each rank sees it, by rank.
        tag: tag of the generation; None: any.
        suffix: suffix that a tag may lack.

    Returns:
        the generation, and whether it is loaded from the folder; None: there is none.
    """
    everywhere = set.intersection(*(set(keys) for keys in local)) if local else set()
    key = newest({*stored, *everywhere}, tag, suffix)
    return None if key is None else (key, key in everywhere)
