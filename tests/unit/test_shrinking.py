"""Ranks that go on after others were lost, and jobs in which none can."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import smp._C as _C
from smp.launching.first_rank import LAUNCHED_VARIABLE
from smp.step import copy_memory, taking_over
from smp.world import host_objects
from smp.world.launch import Launch, Rendezvous
from smp.world.shrinking import (
    choose_keepers,
    fill_places,
    have_all_parts,
    lasting_ranks,
    places_with_replicas,
    refuse_shrinking,
)

LAUNCH = Launch("smp", 0, 4, 0, 4, "node")
IN_A_FILE = Rendezvous("file", path="/shared/rendezvous")
IN_AN_AGENT = Rendezvous("tcp", host="a", port=1, has_server=True)
ELASTIC = {"TORCHELASTIC_RUN_ID": "7", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize("placement", ["cluster", "spread", "TPD", "PDT"])
def test_ranks_keep_their_places_in_whole_replicas(placement: str) -> None:
    grid = _C.ProcessGrid(12, 2, 2, 1, placement)
    for lost in itertools.chain(
        ([rank] for rank in range(12)), itertools.combinations(range(12), 2)
    ):
        kept = lasting_ranks(grid, list(lost))
        broken = {grid.coordinates(rank).rdp for rank in lost}
        assert len(kept) == 4 * (3 - len(broken)) == len(set(kept))
        after = _C.ProcessGrid(len(kept), 2, 2, 1, placement)
        for rank, before in enumerate(kept):
            old, new = grid.coordinates(before), after.coordinates(rank)
            assert (old.pp, old.tp) == (new.pp, new.tp) and old.rdp not in broken
        replicas = [grid.coordinates(kept[rank]).rdp for rank in after.groups("rdp")[0]]
        assert replicas == sorted(replicas)


@pytest.mark.parametrize("placement", ["cluster", "spread", "TPD", "PDT"])
def test_a_replica_more_is_behind_the_others(placement: str) -> None:
    grid, larger = (_C.ProcessGrid(size, 2, 2, 1, placement) for size in (8, 12))
    kept = places_with_replicas(grid, 3)
    assert sorted(kept) == [-1] * 4 + list(range(8))
    for place, rank in enumerate(kept):
        after = larger.coordinates(place)
        assert (rank < 0) == (after.rdp == 2)
        if rank >= 0:
            before = grid.coordinates(rank)
            assert (before.pp, before.tp, before.rdp) == (after.pp, after.tp, after.rdp)


def test_nothing_is_left_without_a_whole_replica() -> None:
    grid = _C.ProcessGrid(4, 2, 1, 1, "cluster")
    assert lasting_ranks(grid, [0, 3]) == []


@pytest.mark.parametrize(
    ("launch", "place", "env", "device", "transport", "text"),
    [
        (LAUNCH, IN_A_FILE, {"TORCHELASTIC_RUN_ID": "7"}, "cpu", "gloo", "torchrun ends all"),
        (LAUNCH, IN_AN_AGENT, {**ELASTIC, "LOCAL_WORLD_SIZE": "4"}, "cpu", "gloo", "only one"),
        (
            LAUNCH,
            IN_AN_AGENT,
            {**ELASTIC, "TORCHELASTIC_MAX_RESTARTS": "3"},
            "cpu",
            "gloo",
            "starts the ranks of a host again",
        ),
        (LAUNCH, IN_A_FILE, {LAUNCHED_VARIABLE: "1"}, "cpu", "gloo", "smp.launch ends all"),
        (Launch("mpi", 0, 4, 0, 4, "n"), IN_A_FILE, {}, "cpu", "gloo", "mpirun ends all"),
        (LAUNCH, IN_A_FILE, {}, "cpu", "mpi", "messages go over MPI"),
        (LAUNCH, Rendezvous("tcp", host="a", port=1), {}, "cpu", "gloo", "in a store of rank 0"),
        (LAUNCH, IN_A_FILE, {}, "cuda", "gloo", "the device is cuda; set SMP_DEVICE=cpu"),
    ],
)
def test_jobs_that_cannot_lose_ranks_are_refused_by_name(
    launch: Launch, place: Rendezvous, env: dict[str, str], device: str, transport: str, text: str
) -> None:
    refuse_shrinking("shrink", LAUNCH, IN_A_FILE, {}, "cpu", "tcp")
    refuse_shrinking("shrink", LAUNCH, IN_AN_AGENT, ELASTIC, "cpu", "tcp")
    with pytest.raises(ValueError, match="on_failure='shrink': .*; .*, or set on_failure") as error:
        refuse_shrinking("shrink", launch, place, env, device, transport)
    assert text in str(error.value)


def test_parts_of_two_broken_replicas_may_be_all_there_are() -> None:
    grid = _C.ProcessGrid(4, 2, 1, 1, "cluster")
    assert lasting_ranks(grid, [0, 3]) == [] and have_all_parts(grid, [0, 3])
    first, second = grid.groups("rdp")[0]
    assert not have_all_parts(grid, [first, second])


def test_copies_are_kept_on_other_hosts_where_there_are_some() -> None:
    assert choose_keepers(["a"] * 3) == [1, 2, 0]
    assert choose_keepers(["a", "a", "b", "b"]) == [2, 3, 0, 1]
    assert choose_keepers(["a", "b", "a", "b"]) == [1, 2, 3, 0]
    hosts = ["a", "a", "a", "b"]
    keepers = choose_keepers(hosts)
    assert sorted(keepers) == [0, 1, 2, 3] and not any(rank == k for rank, k in enumerate(keepers))
    assert sum(hosts[rank] != hosts[keeper] for rank, keeper in enumerate(keepers)) == 2


def test_a_rank_and_the_keeper_of_its_copy_are_not_both_lost() -> None:
    grid = _C.ProcessGrid(4, 4, 1, 1, "cluster")
    keepers = [1, 2, 3, 0]
    assert not have_all_parts(grid, [2]) and have_all_parts(grid, [2], keepers)
    assert have_all_parts(grid, [0, 2], keepers) and not have_all_parts(grid, [0, 3], keepers)


def test_a_process_repeats_the_call_of_its_copy_alone() -> None:
    state: Any = None
    after = taking_over._StateAfter(state, "train", None, False, False, None, [], [])
    head, _ = host_objects.pack_apart(after)
    current: Any = SimpleNamespace(step_to_repeat=None, rank=SimpleNamespace(device="cpu"))
    with pytest.raises(RuntimeError, match="was of 'train', and after it the script calls 'test'"):
        taking_over._repeat(current, copy_memory.KeptCopy(head, torch.empty(0)), {}, "test")


def test_places_go_to_processes_that_wait_and_are_kept() -> None:
    assert fill_places({3}, {}, [5, 4]) == {3: 4}
    assert fill_places({3, 0}, {3: 4}, [4, 6, 5]) == {3: 4, 0: 5}
    assert fill_places({3, 0}, {}, [4]) == {}, "one process is too few for two places"
    assert fill_places({3}, {3: 4}, []) == {3: 4}


def test_a_job_without_spares_has_nothing_to_take_a_place() -> None:
    refuse_shrinking("spare", replace(LAUNCH, spares=0), IN_A_FILE, {}, "cpu", "tcp")
    with pytest.raises(ValueError, match="on_failure='spare': no process waits .* --spares N or"):
        refuse_shrinking("spare", LAUNCH, IN_A_FILE, {}, "cpu", "tcp")
