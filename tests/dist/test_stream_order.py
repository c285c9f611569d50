"""Hosts wait for no collective on a device, and all ranks issue collectives in one order."""

from __future__ import annotations

import pytest
import torch

from tests.dist.pool import Pool
from tests.dist.streams import Layout, differences, is_in_one_order, train_both_ways

SHARDED_STATE = (("shard_optimizer_state", True),)


def _sdp(degree: int) -> tuple[tuple[str, object], ...]:
    return (("sharded_data_parallel_degree", degree), ("sdp_param_persistence_threshold", 0))


EARLY = (("update_in_backward", True), ("microbatches", 1))

LAYOUTS = [
    Layout(dp=2),
    Layout(dp=2, overlap=False),
    Layout(dp=2, config=SHARDED_STATE),
    Layout(dp=2, config=_sdp(2)),
    Layout(dp=4, config=_sdp(2)),
    Layout(dp=2, config=EARLY),
    Layout(tp=2, dp=2, config=EARLY),
    Layout(pp=2, dp=2, config=EARLY),
    Layout(tp=2),
    Layout(tp=2, dp=2),
    Layout(tp=2, dp=2, config=SHARDED_STATE),
    Layout(tp=2, dp=2, config=_sdp(2)),
    Layout(tp=2, config=(("optimize", "speed"), ("prescaled_batch", True))),
    Layout(pp=2, dp=2),
    Layout(pp=2, dp=2, config=SHARDED_STATE),
    Layout(pp=2, dp=2, config=_sdp(2)),
    Layout(pp=2, tp=2),
    Layout(pp=2, tp=2, dp=2),
    Layout(pp=2, tp=2, dp=2, config=SHARDED_STATE),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_host_waits_for_a_collective_of_a_device(pool: Pool, layout: Layout) -> None:
    results = pool.run(layout.world_size, train_both_ways, layout)
    for rank, (plain, streamed) in enumerate(results):
        assert streamed.issued, "nothing went over a group of a device"
        for name in ("losses", "norms"):
            for one, other in zip(getattr(plain, name), getattr(streamed, name), strict=True):
                assert torch.equal(one, other), f"rank {rank}, {name}: {one} and {other}"
        assert plain.params.keys() == streamed.params.keys()
        for name, value in plain.params.items():
            assert torch.equal(value, streamed.params[name]), f"rank {rank}, {name}"
    issued = [streamed.issued for _, streamed in results]
    assert differences(issued) == []
    assert is_in_one_order(issued)


def test_two_orders_are_found() -> None:
    one, other = ("dp [0, 1]", "all_reduce[1]"), ("tp [0, 1]", "all_reduce[1]")
    assert differences([[one, other], [one, other]]) == []
    assert is_in_one_order([[one, other], [one, other]])
    assert len(differences([[one, other], [other, one]])) == 1
    assert not is_in_one_order([[one, other], [other, one]])
    assert len(differences([[one, other], [one]])) == 1


def test_a_ring_of_groups_is_found_in_which_no_two_ranks_differ() -> None:
    def calls(*groups: str) -> list[tuple[str, str]]:
        return [(group, "all_reduce[1]") for group in groups]

    ring = [
        calls("tp [0, 1]", "dp [0, 2]"),
        calls("dp [1, 3]", "tp [0, 1]"),
        calls("dp [0, 2]", "tp [2, 3]"),
        calls("tp [2, 3]", "dp [1, 3]"),
    ]
    assert differences(ring) == []
    assert not is_in_one_order(ring)
