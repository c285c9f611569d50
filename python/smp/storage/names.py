"""Writes the place of a rank into the names of its files."""

from __future__ import annotations

from smp.storage.choose import lockstep_of
from smp.world.rank import Rank


def place_in_names(rank: Rank, is_model: bool) -> str:
    """Returns the place of this rank for the name of one of its files.

    It is ``<pp_rank>_<tp_rank>``, followed by the position in the shard group for a file of its
    own. With sharded parameters and no model parallelism it is that position alone, as in v1.

    Args:
        rank: rank of this process.
        is_model: whether the file has content that is equal on the ranks of a shard group.
    """
    lockstep = lockstep_of(rank)
    is_short = lockstep is not None and lockstep.is_forward and rank.sizes["mp"] == 1
    place = [] if is_short else [str(rank.ranks["pp"]), str(rank.ranks["tp"])]
    if lockstep is not None and not is_model:
        place.append(str(rank.ranks["shard"]))
    return "_".join(place) or "0"
