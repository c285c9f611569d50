"""Base class of modules that are split over the ranks of a tensor-parallel group."""

from __future__ import annotations

from torch import nn


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
