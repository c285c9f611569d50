"""Decides which pipeline rank owns which module: by hand, or by balancing the module tree."""

from smp.partition.contexts import partition, set_partition
from smp.partition.decide import agree, decide
from smp.partition.decision import Decision
from smp.partition.tree import ModuleIndex, build_tree

__all__ = [
    "Decision",
    "ModuleIndex",
    "agree",
    "build_tree",
    "decide",
    "partition",
    "set_partition",
]
