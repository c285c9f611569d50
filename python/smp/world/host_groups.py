"""Lays out collectives of a group on several hosts, and makes the groups for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import smp._C as _C
from smp._device import is_accelerator
from smp.config.schema import Config, config_error

# Makes the communicator of a group from a name and global ranks, for tensors on the CPU. Collective
# over these ranks.
CpuGroups = Callable[[str, Sequence[int]], _C.Communicator]
# Moves a communicator into memory that its ranks share. Collective over them.
Share = Callable[[_C.Communicator, Sequence[int]], _C.Communicator]


def layout_of(ranks: Sequence[int], hosts: Sequence[str], global_rank: int) -> _C.HostLayout:
    """Returns the layout of a group on hosts, as one of its ranks sees it.

    Args:
        ranks: global ranks of the group, one of them ``global_rank``.
        hosts: host of each global rank.
        global_rank: global rank of that rank.
    """
    return _C.lay_out_by_hosts([hosts[rank] for rank in ranks], list(ranks).index(global_rank))


def members(ranks: Sequence[int], layout: _C.HostLayout) -> tuple[list[int], list[int]]:
    """Returns the global ranks at the same place on other hosts, and those of the own host."""
    return [ranks[i] for i in layout.across], [ranks[i] for i in layout.within]


def check_dist_backend(
    config: Config, dp_groups: Sequence[Sequence[int]], hosts: Sequence[str], device_type: str
) -> None:
    """Refuses ``ddp_dist_backend="hierarchical"`` where sums cannot go by hosts.

    Args:
        config: effective configuration.
        dp_groups: global ranks of each data-parallel group.
        hosts: host of each global rank.
        device_type: type of the devices of all ranks.

    Raises:
        ValueError: the same text on every rank.
    """
    if config.ddp_dist_backend != "hierarchical":
        return
    if is_accelerator(device_type):
        raise config_error(
            "ddp_dist_backend",
            "hierarchical",
            "NCCL sums what is on GPUs, and finds the way between hosts by itself",
            "use 'auto'",
        )
    for ranks in dp_groups:
        obstacle = layout_of(ranks, hosts, ranks[0]).obstacle
        if obstacle:
            raise config_error(
                "ddp_dist_backend",
                "hierarchical",
                f"the data-parallel group of the global ranks {list(ranks)} cannot sum by hosts: "
                f"{obstacle}",
                "use 'auto', or give it the same number of ranks, at least 2, on 2 hosts or more",
            )


def go_by_hosts(
    flat: _C.Communicator,
    name: str,
    ranks: Sequence[int],
    layout: _C.HostLayout,
    on_cpu: CpuGroups,
    share: Share,
) -> _C.Communicator:
    """Returns `flat` with sums and gathers that go by hosts. Collective over `ranks`.

    Args:
        flat: communicator of all ranks, for tensors on the CPU.
        name: name of the group.
        ranks: global ranks of the group.
        layout: layout of the group, without an obstacle.
        on_cpu: makes groups.
        share: moves the groups within hosts into shared memory.
    """
    across, within = members(ranks, layout)
    # Scatters and gathers have no common order, so they need separate queues. With shared memory
    # both use one group; without it they are two groups.
    beneath = on_cpu(f"{name}_within", within)
    scatter = share(beneath, within)
    shares = scatter is not beneath
    gather = share(beneath, within) if shares else on_cpu(f"{name}_gather", within)
    return _C.make_hierarchical_communicator(
        flat,
        scatter=scatter,
        across=on_cpu(f"{name}_across", across),
        gather=gather,
        is_host_by_host=layout.is_host_by_host,
    )


def describe(by_hosts: Mapping[str, tuple[int, int]]) -> str:
    """Returns words for the log, empty if no group goes by hosts.

    Args:
        by_hosts: number of hosts and ranks of each, by name of the group.
    """
    if not by_hosts:
        return ""
    groups = ", ".join(f"{name} {n} x {m}" for name, (n, m) in by_hosts.items())
    return f"sums and gathers go by hosts (hosts x ranks of each): {groups}"
