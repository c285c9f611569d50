"""Ranks, sizes and groups, and the exchange of Python objects between ranks.

Ranks and sizes may be read in forked children; communication is refused there.
"""

from __future__ import annotations

import enum
import os
import socket
from collections.abc import Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from smp.world import host_objects, runtime
from smp.world.launch import read_launch
from smp.world.rank import Rank

_T = TypeVar("_T")


class CommGroup(enum.Enum):
    """A kind of group; each process belongs to one group of each kind.

    Ranks of the same partition are in a DP group if they read different batches, and in a DP_CP
    group whether they do or not; RDP and RDP_CP are their parts with the same slice. Without
    context parallelism these are the same groups.
    """

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"
    CP_GROUP = "cp"
    DP_CP_GROUP = "dp_cp"
    RDP_CP_GROUP = "rdp_cp"


class RankType(enum.Enum):
    """The kind of group in which a rank number is counted."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"
    CP_RANK = "cp"
    DP_CP_RANK = "dp_cp"
    RDP_CP_RANK = "rdp_cp"


WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP
CP_GROUP = CommGroup.CP_GROUP


def _run() -> runtime.Runtime:
    """Returns the runtime of this process; the functions of this file ask for it only here."""
    return runtime.current()


# ---- ranks and sizes ---------------------------------------------------------------


def rank() -> int:
    """Returns the position among all processes, in ``[0, size())``."""
    return _run().rank.global_rank


def local_rank() -> int:
    """Returns the position among the processes of this host.

    Before `init` that is the launcher's value, or 0.
    """
    if runtime.is_initialized():
        return _run().rank.local_rank
    return read_launch(os.environ, socket.gethostname()).local_rank


def mp_rank() -> int:
    """Returns the position in the group that holds one whole model."""
    return _run().rank.ranks["mp"]


def dp_rank() -> int:
    """Returns the position in the group that holds the same partition."""
    return _run().rank.ranks["dp"]


def pp_rank() -> int:
    """Returns the index of the partition that this process holds."""
    return _run().rank.ranks["pp"]


def tp_rank() -> int:
    """Returns the position in the group over which single modules are split."""
    return _run().rank.ranks["tp"]


def rdp_rank() -> int:
    """Returns the position in the group that holds the same partition and the same slice."""
    return _run().rank.ranks["rdp"]


def cp_rank() -> int:
    """Returns the position in the group over which the sequences of one batch are split."""
    return _run().rank.ranks["cp"]


def size() -> int:
    """Returns the number of processes."""
    return _run().rank.world_size


def local_size() -> int:
    """Returns the number of processes on this host."""
    return _run().rank.local_size


def mp_size() -> int:
    """Returns how many processes hold one whole model: ``pp_size() * tp_size()``."""
    return _run().rank.sizes["mp"]


def dp_size() -> int:
    """Returns how many processes hold the same partition: ``tp_size() * rdp_size()``.

    Processes that read one batch (`cp_size`) count as one.
    """
    return _run().rank.sizes["dp"]


def pp_size() -> int:
    """Returns the number of partitions."""
    return _run().rank.sizes["pp"]


def tp_size() -> int:
    """Returns the number of processes over which single modules are split."""
    return _run().rank.sizes["tp"]


def rdp_size() -> int:
    """Returns the number of processes that hold the same partition and the same slice.

    Processes that read one batch (`cp_size`) count as one.
    """
    return _run().rank.sizes["rdp"]


def cp_size() -> int:
    """Returns the number of processes over which the sequences of one batch are split."""
    return _run().rank.sizes["cp"]


# ---- groups ------------------------------------------------------------------------


def get_world_group() -> list[int]:
    """Returns all global ranks, ascending."""
    return list(_run().rank.groups["world"])


def get_mp_group() -> list[int]:
    """Returns the global ranks of the caller's MP group, ascending."""
    return list(_run().rank.groups["mp"])


def get_dp_group() -> list[int]:
    """Returns the global ranks of the caller's DP group, ascending."""
    return list(_run().rank.groups["dp"])


def get_pp_group() -> list[int]:
    """Returns the global ranks of the caller's PP group, ascending."""
    return list(_run().rank.groups["pp"])


def get_tp_group() -> list[int]:
    """Returns the global ranks of the caller's TP group, ascending."""
    return list(_run().rank.groups["tp"])


def get_rdp_group() -> list[int]:
    """Returns the global ranks of the caller's RDP group, ascending."""
    return list(_run().rank.groups["rdp"])


def get_cp_group() -> list[int]:
    """Returns the global ranks of the caller's CP group, ascending."""
    return list(_run().rank.groups["cp"])


def _process_group(kind: str) -> dist.ProcessGroup:
    return _run().process_groups.of(kind)


def get_world_process_group() -> dist.ProcessGroup:
    """Returns the `torch.distributed` group of all processes. Needs ``ddp: True``."""
    return _process_group("world")


def get_mp_process_group() -> dist.ProcessGroup:
    """Returns the `torch.distributed` group of the caller's MP group. Needs ``ddp: True``."""
    return _process_group("mp")


def get_dp_process_group() -> dist.ProcessGroup:
    """Returns the `torch.distributed` group of the caller's DP group. Needs ``ddp: True``."""
    return _process_group("dp")


def get_pp_process_group() -> dist.ProcessGroup:
    """Returns the `torch.distributed` group of the caller's PP group. Needs ``ddp: True``."""
    return _process_group("pp")


def get_tp_process_group() -> dist.ProcessGroup:
    """Returns the `torch.distributed` group of the caller's TP group. Needs ``ddp: True``."""
    return _process_group("tp")


def get_rdp_process_group() -> dist.ProcessGroup:
    """Returns the `torch.distributed` group of the caller's RDP group. Needs ``ddp: True``."""
    return _process_group("rdp")


def get_cp_process_group() -> dist.ProcessGroup:
    """Returns the `torch.distributed` group of the caller's CP group. Needs ``ddp: True``."""
    return _process_group("cp")


# ---- objects -----------------------------------------------------------------------


def broadcast(obj: object, group: CommGroup) -> None:
    """Sends an object to all other members of a group, which call `recv_from`.

    Only the sender calls this. It returns when all members have received the object.

    Args:
        obj: any picklable object; tensors are sent by value.
        group: kind of the caller's group.
    """
    here, members = _communicating("broadcast", group)
    if here.exchange is not None and len(members) > 1:
        with here.reporting("smp.broadcast"):
            here.exchange.broadcast(members, *host_objects.pack_message(obj))


def send(obj: object, dest_rank: int, rank_type: RankType) -> None:
    """Sends an object and returns when the peer has called `recv_from`.

    Args:
        obj: any picklable object; tensors are sent by value.
        dest_rank: rank of the receiver in the caller's group of kind `rank_type`.
        rank_type: kind of group in which `dest_rank` is counted.
    """
    here, peer = _peer("send", dest_rank, rank_type)
    exchange = _exchange_with(here, peer, "send")
    with here.reporting("smp.send"):
        exchange.send(peer, *host_objects.pack_message(obj))


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """Receives the next object that a peer has sent with `send` or `broadcast`, in order.

    Args:
        src_rank: rank of the sender in the caller's group of kind `rank_type`.
        rank_type: kind of group in which `src_rank` is counted.

    Returns:
        the object; tensors that were on a GPU are on the caller's device.
    """
    here, peer = _peer("recv_from", src_rank, rank_type)
    exchange = _exchange_with(here, peer, "recv_from")
    with here.reporting("smp.recv_from"):
        data, tensors = exchange.recv(peer)
    return host_objects.unpack(data, here.device, tensors)


def allgather(obj: object, group: CommGroup) -> list[Any]:
    """Returns the objects of all members of a group, in order of rank. Collective over the group.

    Args:
        obj: any picklable object; tensors are sent by value.
        group: kind of the caller's group.
    """
    here, members = _communicating("allgather", group)
    own = host_objects.pack(obj)
    parts = [own]
    if here.exchange is not None and len(members) > 1:
        with here.reporting("smp.allgather"):
            parts = here.exchange.all_gather(members, own, f"smp.allgather({group.name})")
    return [host_objects.unpack(part, here.device) for part in parts]


def of_shard_group(objects: Sequence[_T]) -> list[_T]:
    """Returns the objects of the ranks that hold one copy of a sharded state with this one.

    Args:
        objects: objects of the ranks of the RDP_CP group, from `allgather`.
    """
    groups = _run().rank.groups
    peers = zip(groups["rdp_cp"], objects, strict=True)
    return [item for rank, item in peers if rank in groups["shard"]]


def barrier(group: CommGroup = WORLD) -> None:
    """Waits for the members of the caller's group of this kind. Collective over the group.

    Returns at once in a process with the place of a lost rank, before it comes to where the others
    are.
    """
    if _run().rank.skips_call():
        return
    here, members = _communicating("barrier", group)
    if here.exchange is not None and len(members) > 1:
        with here.reporting("smp.barrier"):
            here.exchange.barrier(members, f"smp.barrier({group.name})")


def mp_barrier() -> None:
    """Waits for the members of the MP group; see `barrier`."""
    barrier(MP_GROUP)


def dp_barrier() -> None:
    """Waits for the members of the DP group; see `barrier`."""
    barrier(DP_GROUP)


def pp_barrier() -> None:
    """Waits for the members of the PP group; see `barrier`."""
    barrier(PP_GROUP)


def tp_barrier() -> None:
    """Waits for the members of the TP group; see `barrier`."""
    barrier(TP_GROUP)


def rdp_barrier() -> None:
    """Waits for the members of the RDP group; see `barrier`."""
    barrier(RDP_GROUP)


def cp_barrier() -> None:
    """Waits for the members of the CP group; see `barrier`."""
    barrier(CP_GROUP)


def _communicating(what: str, group: CommGroup) -> tuple[Rank, list[int]]:
    here = _run().rank
    here.check_process(f"smp.{what}")
    if not isinstance(group, CommGroup):
        raise ValueError(
            f"{here.prefix}smp.{what}: group is {group!r}; pass a CommGroup such as smp.DP_GROUP"
        )
    return here, list(here.groups[group.value])


def _peer(what: str, peer_rank: int, rank_type: RankType) -> tuple[Rank, int]:
    """Returns this rank, and the global rank of the peer."""
    here = _run().rank
    here.check_process(f"smp.{what}")
    if not isinstance(rank_type, RankType):
        raise ValueError(
            f"{here.prefix}smp.{what}: rank_type is {rank_type!r}; pass a RankType such as "
            "smp.RankType.DP_RANK"
        )
    members = here.groups[rank_type.value]
    if not 0 <= peer_rank < len(members):
        raise ValueError(
            f"{here.prefix}smp.{what}: {rank_type.name} {peer_rank} does not exist; the group "
            f"has {len(members)} members"
        )
    return here, members[peer_rank]


def _exchange_with(here: Rank, peer: int, what: str) -> Any:
    if here.exchange is None:
        raise ValueError(
            f"{here.prefix}smp.{what}: rank {peer} is the only process; there is no peer"
        )
    return here.exchange
