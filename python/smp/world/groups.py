"""Makes the communicators and process groups of a process grid."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import smp._C as _C
from smp._device import is_accelerator
from smp._torch_releases import abort_of
from smp.config.schema import Config
from smp.world import nccl
from smp.world.connecting import until_a_rank_fails
from smp.world.host_groups import CpuGroups, go_by_hosts, layout_of, members

# Kinds that users name. Ranks of the kinds dp and rdp read different batches.
BATCH_KINDS = ("world", "mp", "dp", "pp", "tp", "rdp", "cp")
# Ranks of the kinds dp_cp and rdp_cp hold equal parameters, and those of tp_cp run their tasks in
# one order. Without context parallelism these are dp, rdp and tp.
GROUP_KINDS = (*BATCH_KINDS, "dp_cp", "rdp_cp", "tp_cp")
# Parts of an rdp_cp group: ranks that hold one copy of a sharded state together, and the ranks that
# hold equal parts of it (docs/design/memory.md).
SHARD_KINDS = ("shard", "replica")

# Gloo's own time-out closes all connections of a group; ours has to come first.
_NEVER = timedelta(days=365)


def make_grid(config: Config, world_size: int) -> _C.ProcessGrid:
    """Returns the grid of all processes that the configuration demands."""
    return _C.ProcessGrid(
        world_size,
        config.pipeline_parallel_degree,
        config.tensor_parallel_degree,
        config.context_parallel_degree,
        config.placement_strategy,
    )


@dataclass
class Groups:
    """Communicators of this rank; None for a group of one.

    `dp_cp`, `rdp_cp`, `tp`, `cp` and `mp` serve tensors on the device of the run, except that `mp`
    serves CPU tensors if ``mp_is_on_host``. The control communicators and those with ``host`` in
    the name serve CPU tensors.
    Only the reducers use `dp_cp` and `rdp_cp`. Only `tp_group` (regions of split modules) uses `tp`
    and `tp_control`, and only `cp_group` (regions of split sequences) uses `cp` and `cp_control`,
    because all ranks must issue the operations of one communicator in one order.
    Between steps, `device_numbers` uses `mp`, `tp`, `shard_reduce` and `replica`, and updates of
    whole tensors use `tp`, `shard_reduce` and `dp_cp`.
    Where `dp_cp`, `rdp_cp` or `shard` run on streams of a device, `dp_cp_host`, `rdp_cp_host` and
    `shard_host` carry the host messages of their users, in the same order; else they are the same
    groups.
    `shard` gathers parameters; `shard_reduce` and `replica` reduce gradients of sharded states.
    Gradients of parameters that all ranks of a tp group hold are reduced by `whole_shard_reduce`,
    `whole_replica` and then `whole_tp`, because reducers do not agree on an order among each other.
    Where a shard group of devices spans hosts evenly, `shard_across` connects equal places of its
    hosts and `shard_within` the ranks of this host.
    `everyone` ends steps with ``on_failure``, and has no tensors.
    Without tensor parallelism the rdp_cp group is the dp_cp group, and has no communicator of its
    own.
    ``run_ahead`` is true if the host does not wait for the collectives of some of them.
    ``by_hosts`` maps names of CPU groups whose sums and gathers go by hosts to the number of hosts
    and of ranks on each.
    """

    dp_cp: _C.Communicator | None = None
    dp_cp_host: _C.Communicator | None = None
    dp_cp_control: _C.Communicator | None = None
    mp: _C.Communicator | None = None
    mp_is_on_host: bool = False
    rdp_cp: _C.Communicator | None = None
    rdp_cp_host: _C.Communicator | None = None
    tp: _C.Communicator | None = None
    tp_control: _C.Communicator | None = None
    cp: _C.Communicator | None = None
    cp_control: _C.Communicator | None = None
    shard: _C.Communicator | None = None
    shard_host: _C.Communicator | None = None
    shard_across: _C.Communicator | None = None
    shard_within: _C.Communicator | None = None
    shard_reduce: _C.Communicator | None = None
    replica: _C.Communicator | None = None
    whole_shard_reduce: _C.Communicator | None = None
    whole_replica: _C.Communicator | None = None
    whole_tp: _C.Communicator | None = None
    tp_group: _C.TensorParallelGroup = field(
        default_factory=lambda: _C.TensorParallelGroup(None, 0, 1)
    )
    cp_group: _C.TensorParallelGroup = field(
        default_factory=lambda: _C.TensorParallelGroup(None, 0, 1)
    )
    everyone: _C.Communicator | None = None
    by_hosts: dict[str, tuple[int, int]] = field(default_factory=dict)
    run_ahead: bool = False

    @property
    def made(self) -> list[_C.Communicator]:
        """The communicators of this rank."""
        return [group for group in vars(self).values() if isinstance(group, _C.Communicator)]

    def abort(self) -> None:
        """Ends operations in flight, for a run that has failed."""
        for communicator in self.made:
            communicator.abort()

    def shut_down(self) -> None:
        """Ends the groups of devices in one order on all ranks. Collective."""
        for communicator in dict.fromkeys(self.made):
            communicator.shut_down()


def split_into_shards(rdp_cp_ranks: Sequence[int], shard_size: int) -> dict[str, list[list[int]]]:
    """Returns the groups of `SHARD_KINDS` into which an rdp_cp group is split.

    Args:
        rdp_cp_ranks: global ranks of the group, ascending.
        shard_size: ranks that hold one copy of the state together; they are neighbours.
    """
    shards = [
        list(rdp_cp_ranks[begin : begin + shard_size])
        for begin in range(0, len(rdp_cp_ranks), shard_size)
    ]
    return {"shard": shards, "replica": [list(ranks) for ranks in zip(*shards, strict=True)]}


def all_groups(grid: _C.ProcessGrid, shard_size: int) -> dict[str, list[list[int]]]:
    """Returns all groups of every kind, in one order on all ranks."""
    result = {kind: [list(ranks) for ranks in grid.groups(kind)] for kind in GROUP_KINDS}
    for kind in SHARD_KINDS:
        result[kind] = [
            ranks
            for rdp_cp_ranks in result["rdp_cp"]
            for ranks in split_into_shards(rdp_cp_ranks, shard_size)[kind]
        ]
    return result


def own_groups(
    grid: _C.ProcessGrid, global_rank: int, shard_size: int
) -> dict[str, tuple[int, ...]]:
    """Returns the group of each kind that a rank belongs to."""
    return {
        kind: next(tuple(ranks) for ranks in groups if global_rank in ranks)
        for kind, groups in all_groups(grid, shard_size).items()
    }


def build_groups(
    grid: _C.ProcessGrid,
    global_rank: int,
    store: dist.Store,
    on_cpu: CpuGroups,
    *,
    shard_size: int,
    device: torch.device,
    board: _C.FaultBoard,
    machine: str,
    gather_hosts: Sequence[str] = (),
    sum_hosts: Sequence[str] = (),
    shared_memory: bool,
    timeout_s: float,
    hang_s: float = 0.0,
    shares_gpus: bool = False,
    confirms_steps: bool = False,
) -> Groups:
    """Makes communicators of the groups of `global_rank`. Collective over the world.

    Args:
        grid: process grid.
        global_rank: global rank of this process.
        store: store for the connections of NCCL; keys that begin with the name of a group are
            reserved.
        on_cpu: makes communicators for tensors on the CPU.
        shard_size: ranks that hold one copy of a sharded state together; 1: nothing is sharded.
        device: device of the tensors that `dp_cp` serves.
        board: ends waits of `tp_group`, of `cp_group` and of shared memory when a rank fails, and
            counts the collectives of all groups.
        machine: text that is equal on ranks that may share memory.
        gather_hosts: host of each rank, if parameters are to be gathered between hosts first.
        sum_hosts: host of each rank, if sums are to go by hosts where they can.
        shared_memory: whether this rank wants to share memory in collectives.
        timeout_s: time-out of the connections, and of operations that run on a device.
        hang_s: seconds after which a collective that blocks a device is reported; 0: never.
        shares_gpus: whether pipeline ranks share GPUs, which NCCL does not allow within a group.
        confirms_steps: whether all ranks end each step together.
    """
    made = Groups()
    own = own_groups(grid, global_rank, shard_size)
    flights = _C.FlightWatch(board, str(device), timeout_s=timeout_s, report_after_s=hang_s)

    def ranks_of(kind: str) -> list[int]:
        return list(own[kind])

    def watched(
        communicator: _C.Communicator | None, ranks: Sequence[int]
    ) -> _C.Communicator | None:
        if communicator is None:
            return None
        return _C.watch_collectives(communicator, board, list(ranks), flights)

    def name_of(kind: str) -> str:
        return kind if grid.group_size("cp") > 1 else kind.removesuffix("_cp")

    def control(kind: str) -> _C.Communicator | None:
        name, ranks = f"{name_of(kind)}_control", ranks_of(kind)
        if len(ranks) == 1:
            return None
        return on_cpu(name, ranks)

    def between(name: str, ranks: list[int]) -> _C.Communicator | None:
        if len(ranks) == 1:
            return None
        return make_on_device(device, store, on_cpu, name, ranks, global_rank, timeout_s)

    def on_device(kind: str, name: str | None = None) -> _C.Communicator | None:
        return between(name or name_of(kind), ranks_of(kind))

    def sharing(
        communicator: _C.Communicator | None, ranks: Sequence[int]
    ) -> _C.Communicator | None:
        if communicator is None or communicator.is_stream_ordered:
            return watched(communicator, ranks)
        return watched(on_host(communicator, ranks), ranks)

    def beside(kind: str, communicator: _C.Communicator | None) -> _C.Communicator | None:
        if communicator is None or not communicator.is_stream_ordered:
            return communicator
        ranks = ranks_of(kind)
        return watched(on_host(on_cpu(f"{name_of(kind)}_host", ranks), ranks), ranks)

    def by_hosts(kind: str, hosts: Sequence[str], name: str = "") -> _C.Communicator | None:
        name, ranks = name or name_of(kind), ranks_of(kind)
        flat = between(name, ranks)
        if flat is None or flat.is_stream_ordered or not hosts:
            return sharing(flat, ranks)
        layout = layout_of(ranks, hosts, global_rank)
        if layout.obstacle:
            return sharing(flat, ranks)
        made.by_hosts[name] = (len(layout.across), len(layout.within))
        return watched(go_by_hosts(flat, name, ranks, layout, on_cpu, on_host), ranks)

    def summing(kind: str, name: str = "") -> _C.Communicator | None:
        return by_hosts(kind, sum_hosts, name)

    def on_host(communicator: _C.Communicator, ranks: Sequence[int]) -> _C.Communicator:
        return _C.share_collectives(
            communicator,
            machine=machine,
            enabled=shared_memory,
            faults=board,
            ranks=list(ranks),
            timeout_s=timeout_s,
        )

    def splitting(
        kind: str,
    ) -> tuple[_C.Communicator, _C.Communicator, _C.TensorParallelGroup]:
        ranks, plain = ranks_of(kind), on_device(kind)
        assert plain is not None
        is_ahead = plain.is_stream_ordered
        beneath = control(kind) if is_ahead else plain
        assert beneath is not None
        on_hosts = watched(on_host(beneath, ranks), ranks)
        communicator = watched(plain, ranks) if is_ahead else on_hosts
        assert communicator is not None and on_hosts is not None
        group = _C.TensorParallelGroup(
            communicator,
            grid.group_rank(kind, global_rank),
            grid.group_size(kind),
            control=on_hosts,
            faults=board,
            ranks=ranks,
            timeout_s=timeout_s,
        )
        return communicator, on_hosts, group

    made.dp_cp_control = watched(control("dp_cp"), own["dp_cp"])
    if confirms_steps:
        everyone = ranks_of("world")
        made.everyone = watched(on_host(on_cpu("everyone", everyone), everyone), everyone)
    made.dp_cp = summing("dp_cp")
    made.dp_cp_host = beside("dp_cp", made.dp_cp)
    if shard_size > 1:
        ranks = own["shard"]
        made.shard = by_hosts("shard", gather_hosts)
        made.shard_host = beside("shard", made.shard)
        made.shard_reduce = summing("shard", "shard_reduce")
        made.replica = summing("replica")
        if gather_hosts and made.shard is not None and made.shard.is_stream_ordered:
            layout = layout_of(ranks, gather_hosts, global_rank)
            if not layout.obstacle and layout.is_host_by_host:
                across, within = members(ranks, layout)
                made.shard_across = watched(between("shard_across", across), across)
                made.shard_within = watched(between("shard_within", within), within)
    if shard_size > 1 and grid.group_size("tp") > 1:
        made.whole_shard_reduce = summing("shard", "whole_shard_reduce")
        made.whole_replica = summing("replica", "whole_replica")
        made.whole_tp = summing("tp", "whole_tp")
    if grid.group_size("tp") > 1:
        made.rdp_cp = summing("rdp_cp")
        made.rdp_cp_host = beside("rdp_cp", made.rdp_cp)
        made.tp, made.tp_control, made.tp_group = splitting("tp")
    if grid.group_size("cp") > 1:
        made.cp, made.cp_control, made.cp_group = splitting("cp")
    if own["mp"] == own["tp"]:
        made.mp = made.tp
    else:
        made.mp_is_on_host = shares_gpus
        made.mp = watched(control("mp") if shares_gpus else on_device("mp"), own["mp"])
    made.run_ahead = any(group.is_stream_ordered for group in made.made)
    return made


def make_channel(
    device: torch.device | str,
    store: dist.Store,
    src: int,
    dst: int,
    index: int,
    global_rank: int,
    timeout_s: float,
) -> _C.Communicator:
    """Makes a group for tensors from one rank to another one. Collective over both.

    The group is NCCL's for GPUs, and that of the registered backend for other accelerators.

    Args:
        device: device of the tensors.
        store: store for the connections.
        src: global rank of the source, which is rank 0 of the group.
        dst: global rank of the destination.
        index: number among the channels from ``src`` to ``dst``.
        global_rank: global rank of this process.
        timeout_s: time-out of the connection, and of a copy.
    """
    name, ranks = f"channel{index}to{dst}", [src, dst]
    device = torch.device(device)
    if device.type == "cuda":
        return _make_nccl(device, store, name, ranks, global_rank, timeout_s, nccl.CHANNEL_CTAS)
    return _make_registered(device, store, name, ranks, global_rank, timeout_s)


def can_make_channels(device: torch.device | str) -> bool:
    """Returns whether `make_channel` can make groups for tensors of a device."""
    device = torch.device(device)
    return is_accelerator(device) and (device.type != "cuda" or dist.is_nccl_available())


def make_on_device(
    device: torch.device,
    store: dist.Store,
    on_cpu: CpuGroups,
    name: str,
    ranks: Sequence[int],
    global_rank: int,
    timeout_s: float,
) -> _C.Communicator:
    """Makes a communicator for tensors on a device. Collective over `ranks`.

    Args:
        device: device of the tensors; NCCL serves GPUs.
        store: store for the connections of the accelerators' backend.
        on_cpu: makes communicators for the CPU.
        name: name of the group, for keys of the store and errors.
        ranks: global ranks of the group.
        global_rank: global rank of this process.
        timeout_s: time-out of the connections.
    """
    if not is_accelerator(device):
        return on_cpu(name, ranks)
    if device.type == "cuda":
        return _make_nccl(device, store, name, ranks, global_rank, timeout_s)
    return _make_registered(device, store, name, ranks, global_rank, timeout_s)


def backends_for(device: torch.device) -> str:
    """Returns the backends of `torch.distributed` for tensors on the CPU and on ``device``."""
    if not is_accelerator(device):
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"


def over_gloo(
    store: dist.Store,
    global_rank: int,
    *,
    loopback: bool,
    timeout_s: float,
    board: _C.FaultBoard | None = None,
) -> CpuGroups:
    """Returns a maker of Gloo groups, in which each rank connects to each other one.

    Args:
        store: store for the connections.
        global_rank: global rank of this process.
        loopback: whether all ranks are on one machine; then Gloo listens on loopback only.
        timeout_s: time-out of the connections.
        board: ends the wait for connections when a rank has failed; None: nothing does.
    """

    def make(name: str, ranks: Sequence[int]) -> _C.Communicator:
        gloo: Any = dist.ProcessGroupGloo  # its stub lacks the options
        # Not what the environment says: `process_groups` changes it for a while, on each rank at
        # another time, and a group that is lazy on some ranks only crashes.
        options = gloo._Options()
        if loopback:
            options._devices = [gloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        elif interface := os.environ.get("GLOO_SOCKET_IFNAME"):
            first = interface.split(",")[0]
            options._devices = [gloo.create_device(interface=first, lazy_init=False)]
        else:
            options._devices = [gloo.create_default_device(lazy_init=False)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 2
        own = dist.PrefixStore(f"{name}/{ranks[0]}", store)
        backend = until_a_rank_fails(
            board,
            torch.device("cpu"),
            lambda: gloo(own, list(ranks).index(global_rank), len(ranks), options),
        )
        backend._set_default_timeout(_NEVER)
        return _C.make_c10d_communicator(backend, f"gloo:{name}")

    return make


def over_sockets(sockets: _C.PeerSockets) -> CpuGroups:
    """Returns a maker of groups over this process's connections, which open on first use."""

    def make(name: str, ranks: Sequence[int]) -> _C.Communicator:
        return _C.make_socket_communicator(sockets, f"tcp:{name}", list(ranks))

    return make


def _make_nccl(
    device: torch.device | str,
    store: dist.Store,
    name: str,
    ranks: Sequence[int],
    global_rank: int,
    timeout_s: float,
    max_ctas: int | None = None,
) -> _C.Communicator:
    nccl.set_defaults()
    group: Any = dist.ProcessGroupNCCL
    backend = group(
        dist.PrefixStore(f"{name}/{ranks[0]}", store),
        ranks.index(global_rank),
        len(ranks),
        nccl.group_options(timeout_s, max_ctas),
    )
    return _C.make_c10d_communicator(backend, f"nccl:{name}", str(device), abort_of(backend))


def _make_registered(
    device: torch.device,
    store: dist.Store,
    name: str,
    ranks: Sequence[int],
    global_rank: int,
    timeout_s: float,
) -> _C.Communicator:
    """Makes a group by the backend that `torch.distributed` knows for a type of devices."""
    kind = dist.get_default_backend_for_device(device.type)
    plugin = dist.Backend._plugins.get(kind.upper())
    if plugin is None or plugin.extended_api:
        raise RuntimeError(
            f"smp: SMP_DEVICE={device.type}: smp needs a backend that was registered by "
            "torch.distributed.Backend.register_backend and takes store, rank, size and time-out "
            f"(without extended_api=True); got {kind!r}"
        )
    backend: Any = plugin.creator_fn(
        dist.PrefixStore(f"{name}/{ranks[0]}", store),
        list(ranks).index(global_rank),
        len(ranks),
        timedelta(seconds=timeout_s),
    )
    return _C.make_c10d_communicator(backend, f"{kind}:{name}", str(device), abort_of(backend))
