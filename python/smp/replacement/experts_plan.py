"""Reads from the plans of models which modules are experts, by names alone.

The words and their meanings are those of ``transformers/distributed/expert_parallel.py``
(Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from smp.replacement import plans

#: Word for a module that takes tokens, numbers of experts and weights.
DISPATCH = plans.SPREAD
#: Word for a parameter with one slice of dim 0 for each expert.
EACH = plans.EACH
#: Word for a parameter of such a module that is the same for all experts.
COMMON = plans.PARTIAL


@dataclass
class Named:
    """A module of experts that a plan names.

    Attributes:
        each: names of parameters with a slice for each expert; empty if the plan names none.
        common: names of parameters, and of modules inside, that all experts use.
    """

    each: set[str] = field(default_factory=set)
    common: set[str] = field(default_factory=set)


def named_experts(plan: Mapping[str, str], paths: Iterable[str]) -> dict[str, Named]:
    """Returns the modules of experts, by path.

    Args:
        plan: words by path, ``*`` for one component.
        paths: paths of modules and parameters, relative to the module that the plan is for.
    """
    words = plans.match(plan, paths).words
    found = {path: Named() for path, word in words.items() if word == DISPATCH}
    for path, word in words.items():
        holder, _, name = path.rpartition(".")
        if holder in found and word == EACH:
            found[holder].each.add(name)
        if holder in found and word == COMMON:
            found[holder].common.add(name)
    return found
