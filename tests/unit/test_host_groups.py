"""Positions of a group on hosts, and the groups whose sums can go by hosts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from smp import _C
from smp.config.schema import Config
from smp.world.host_groups import check_dist_backend, describe, layout_of, members

HOSTS = ("a", "a", "b", "b", "a", "a", "b", "b")


def test_members_are_global_ranks() -> None:
    layout = layout_of([0, 1, 6, 7], HOSTS, 7)
    assert members([0, 1, 6, 7], layout) == ([1, 7], [6, 7])
    assert layout.is_host_by_host and not layout.obstacle
    assert not layout_of([0, 2, 4, 6], HOSTS, 2).is_host_by_host


def test_hierarchical_needs_every_replica_group_on_hosts() -> None:
    hierarchical = Config.from_dict({"ddp_dist_backend": "hierarchical", "ddp": True})
    check_dist_backend(hierarchical, [[0, 1, 2, 3], [4, 5, 6, 7]], HOSTS, "cpu")
    with pytest.raises(ValueError, match=r"global ranks \[0, 4\] cannot sum by hosts"):
        check_dist_backend(hierarchical, [[1, 3, 4, 6], [0, 4]], HOSTS, "cpu")
    with pytest.raises(ValueError, match="NCCL sums what is on GPUs"):
        check_dist_backend(hierarchical, [[0, 1, 2, 3]], HOSTS, "cuda")
    for other in ("auto", "flat", "nccl"):
        config = Config.from_dict({"ddp_dist_backend": other, "ddp": True})
        check_dist_backend(config, [[0, 4]], HOSTS, "cuda")
        assert config.sums_by_hosts == (other == "auto")


@pytest.mark.parametrize("per_host", [2, 4, 8])
@pytest.mark.parametrize("num_hosts", [2, 4])
def test_default_placement_puts_slow_links_between_stages_and_replicas(
    per_host: int, num_hosts: int
) -> None:
    """Tensor parallelism stays inside of a host, and a pipeline crosses no more than it has to."""
    world = num_hosts * per_host
    hosts = [rank // per_host for rank in range(world)]
    degrees = [2**i for i in range(world.bit_length())]
    num_crossing = 0
    for tp in (d for d in degrees if d <= per_host):
        for pp in (d for d in degrees if d * tp <= world):
            grid = _C.ProcessGrid(world, pp, tp, 1, Config.from_dict({}).placement_strategy)
            for ranks in grid.groups("tp"):
                assert len({hosts[rank] for rank in ranks}) == 1
            for ranks in grid.groups("pp"):
                crossings = sum(hosts[a] != hosts[b] for a, b in pairwise(ranks))
                assert crossings == max(1, pp * tp // per_host) - 1
                num_crossing += crossings
    assert num_crossing > 0


def test_the_log_names_groups_that_sum_by_hosts() -> None:
    assert describe({}) == ""
    assert describe({"dp": (2, 4)}).endswith("(hosts x ranks of each): dp 2 x 4")
