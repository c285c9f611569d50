"""What the names of a rank's files say of its place."""

from __future__ import annotations

from smp.storage.choose import lockstep_of
from smp.world.rank import Rank


def place_in_names(rank: Rank, is_model: bool) -> str:
    """The place of this rank in the name of one of its files.

    ``<pp_rank>_<tp_rank>``, and the position in its shard group where that has its own; with
    sharded parameters and no model parallelism that position alone, as v1 has it.

    Args:
        rank: of this process.
        is_model: the file has what the ranks of a shard group have alike.
    """
    lockstep = lockstep_of(rank)
    is_short = lockstep is not None and lockstep.is_forward and rank.sizes["mp"] == 1
    place = [] if is_short else [str(rank.ranks["pp"]), str(rank.ranks["tp"])]
    if lockstep is not None and not is_model:
        place.append(str(rank.ranks["shard"]))
    return "_".join(place) or "0"
