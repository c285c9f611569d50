"""Base class of modules that are split over the ranks of a tensor-parallel group."""

from __future__ import annotations

from typing import Any

from torch import nn

from smp.nn.layout import Layout
from smp.tensor_parallel import reading


class DistributedModule(nn.Module):
    """A module that takes the place of another one and is split over ranks.

    Derive from it to register a distributed form of a module of your own (see ``smp.tp_register``).
    ``__init__`` takes sizes of the whole module and raises :class:`Unsupported` where they cannot
    be split; the module that was to be replaced stays then.
    """


class IndivisibleModule(DistributedModule):
    """A distributed module that reads the parameters of its children.

    The partitioner gives its whole subtree to one pipeline rank.
    """

    is_indivisible = True


class ReadAsWhole(DistributedModule):
    """A module with a weight split along dim 1, which code outside of it gets whole.

    Such code was written for the module whose place this one has taken. A module that was made as a
    distributed one gives everybody the part of this rank.
    """

    _smp_split: reading.Split | None = None

    _sizes: list[int]
    _layout: Layout

    def take_place_of(self, name: str) -> None:
        """Says that it has taken the place of the plain module of this name in a model."""
        if len(self._sizes) == 1:
            return
        weight = f"{name}.weight" if name else "weight"
        self.__dict__["_smp_split"] = reading.Split(
            weight, 1, tuple(self._sizes), self._layout.has_own_batches
        )

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if name == "weight" and self._smp_split is not None and reading.is_outside():
            return reading.whole(value, self._smp_split)
        return value
