"""Describes what forwards of a model write to its modules, as found by the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Index of a module and name of one of its attributes or buffers.
Key = tuple[int, str]


@dataclass(frozen=True)
class ModuleWrites:
    """Writes of forwards to modules of a model, and uses of the written values.

    Attributes:
        own: attributes and buffers of which each microbatch needs a value of its own.
        users: (module, module, name): code of the first one uses an attribute or buffer of the
            second that is written and that several modules use, itself included.
        ties: pairs of modules that use the same container or buffer whose contents change in
            place; they have to be on one rank.
        observed: modules with hooks that write to something outside modules; their callers have to
            run on the rank of the step body.
        carried: attributes in which a microbatch finds the value of the one before; no buffers.
        replaced: children that are other modules after the first forward.
        mixed: modules that keep a value of one microbatch where the next one would find it.
    """

    own: frozenset[Key] = frozenset()
    users: frozenset[tuple[int, int, str]] = frozenset()
    ties: frozenset[tuple[int, int]] = frozenset()
    observed: frozenset[int] = frozenset()
    mixed: frozenset[int] = frozenset()
    carried: frozenset[Key] = frozenset()
    replaced: frozenset[Key] = frozenset()

    @property
    def reasons_for_order(self) -> frozenset[int]:
        """Returns modules because of which microbatches have to run one after the other."""
        return self.observed | self.mixed | frozenset(idx for _, idx in self.ties)

    @property
    def in_order(self) -> bool:
        """Returns whether microbatches have to run one after the other."""
        return bool(self.reasons_for_order)

    def renumbered(self, idxs: Sequence[int]) -> ModuleWrites:
        """Returns the same writes with other indices: ``idxs`` has the new one of each module."""
        return ModuleWrites(
            own=frozenset((idxs[idx], name) for idx, name in self.own),
            users=frozenset((idxs[user], idxs[idx], name) for user, idx, name in self.users),
            ties=frozenset((idxs[a], idxs[b]) for a, b in self.ties),
            observed=frozenset(idxs[idx] for idx in self.observed),
            mixed=frozenset(idxs[idx] for idx in self.mixed),
            carried=frozenset((idxs[idx], name) for idx, name in self.carried),
            replaced=frozenset((idxs[idx], name) for idx, name in self.replaced),
        )
