"""Notices collectives that a model calls by itself, for which a trace on one rank would wait."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import distributed
from torch._ops import OpOverload
from torch.distributed.distributed_c10d import _resolve_process_group


class OwnCollective(Exception):
    """A model calls a collective of `torch.distributed` of several ranks.

    Attributes:
        operator: name of the collective.
        ranks: global ranks of its group.
    """

    def __init__(self, operator: str, ranks: Sequence[int]) -> None:
        super().__init__(f"the model calls {operator} by itself")
        self.operator, self.ranks = operator, ranks

    def is_among(self, ranks: Collection[int]) -> bool:
        """Returns whether the group has no other ranks than these."""
        return set(self.ranks) <= set(ranks)


def refuse_collective(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Lets all operators pass but collectives of several ranks.

    Raises:
        OwnCollective: it is one.
    """
    if "c10d" not in func.namespace:
        return
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if "process_group" in given:
        group = distributed.ProcessGroup.unbox(given["process_group"])
    elif "group_name" in given:
        group = _resolve_process_group(given["group_name"])
    else:
        return
    ranks = distributed.get_process_group_ranks(group)
    if len(ranks) > 1:
        raise OwnCollective(str(func), ranks)
