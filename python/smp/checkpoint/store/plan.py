"""What is to be sent, deleted and loaded, from what is where. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from smp.checkpoint.manifest import FILE_NAME
from smp.checkpoint.store.names import Key


@dataclass(frozen=True)
class Stored:
    """One generation as it lies in a store.

    Attributes:
        sizes: bytes of its objects by name, the manifest included.
        changed_s: when the last of them came, by the clock of the store; 0: unknown.
    """

    key: Key
    sizes: Mapping[str, int]
    changed_s: float = 0.0

    @property
    def is_complete(self) -> bool:
        """The manifest comes last, so that all is there if it is."""
        return FILE_NAME in self.sizes


def missing(wanted: Mapping[str, int], there: Mapping[str, int]) -> list[str]:
    """Files that are not in the store with all their bytes.

    Args:
        wanted, there: bytes by name.
    """
    return [name for name, num_bytes in wanted.items() if there.get(name) != num_bytes]


def shares(wanted: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """Which rank sends which files: the largest first, each to the rank with the fewest bytes.

    Files are in a folder that all ranks see, so that any rank can send any of them; so a job of
    another size can go on with what an earlier one has left.
    """
    totals = [0] * num_ranks
    result: list[list[str]] = [[] for _ in range(num_ranks)]
    for name in sorted(wanted, key=lambda name: (-wanted[name], name)):
        rank = totals.index(min(totals))
        result[rank].append(name)
        totals[rank] += wanted[name] + 1  # files without bytes are spread, too
    return result


def surplus(there: Iterable[str], wanted: Mapping[str, int]) -> list[str]:
    """Objects in a generation's folder that do not belong to it."""
    return sorted(name for name in there if name not in wanted and name != FILE_NAME)


def doomed(
    found: Iterable[Stored],
    done: Key,
    keep: int | None,
    held: Set[Key],
    now_s: float,
    quiet_s: float,
) -> list[Key]:
    """What is deleted after a generation has become complete.

    Complete ones beyond the newest ``keep``, and those that were never completed: they are older
    than the one that is complete now, and nothing of them has changed for ``quiet_s``.

    Args:
        done: the one that has become complete; it stays.
        keep: None: complete ones stay.
        held: that this job still sends or reads; they stay.
        now_s: by the clock of the store, as near as is known.
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
    """The newest generation, or the newest of a tag, with or without its suffix."""
    names = None if tag is None else (tag, tag + suffix)
    return max((key for key in found if names is None or key.name in names), default=None)


def choose(
    stored: Iterable[Key], local: Sequence[Iterable[Key]], tag: str | None, suffix: str
) -> tuple[Key, bool] | None:
    """What a job loads: the newest that the store has, or that every rank sees in its folder.

    Args:
        stored: complete in the store.
        local: complete in the folder that each rank sees, by rank.

    Returns:
        the generation, and whether it is loaded from the folder; None: there is none.
    """
    everywhere = set.intersection(*(set(keys) for keys in local)) if local else set()
    key = newest({*stored, *everywhere}, tag, suffix)
    return None if key is None else (key, key in everywhere)
