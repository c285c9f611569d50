"""Places of one more replica, which processes that wait get while the ranks train."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist

import smp._C as _C
from smp.world import recruits, spares
from smp.world.recruits import Recruits
from smp.world.spares import Place, Waiting
from tests.patience import wait_until
from tests.unit.test_spares import HELLO, _store, waiting

__all__ = ["_store"]
GRID = _C.ProcessGrid(4, 2, 1, 1, "cluster")
PLACE = Place(0, 3, [0, 1, 2, 3], [HELLO] * 4, [], ["node"] * 4)


@pytest.fixture(name="own")
def _own(store: dist.Store) -> Recruits:
    return Recruits(Waiting(store, range(0)), GRID, PLACE)


def look_until_places(own: Recruits, found: list[spares.Newcomer], begin_s: float = 10.0) -> None:
    """Looks until all processes have places, from a time on."""
    clock = itertools.count(begin_s, recruits._LOOK_AT_PLACES_S)

    def have_places() -> bool:
        own.look(next(clock))
        return all(newcomer.place is not None for newcomer in found)

    wait_until(have_places, lambda: found)


def test_a_replica_is_complete_when_its_processes_ask_for_their_state(
    store: dist.Store, own: Recruits
) -> None:
    first, _ = waiting(store, 7)
    for now_s in (0.0, 2.0, 4.0):
        own.look(now_s)
    assert first.place is None and own.decision is None, "one process is not a replica of two"
    second, _ = waiting(store, 5)
    look_until_places(own, [first, second])
    assert {first.number, second.number} == {5, 7}
    for newcomer in (second, first):
        place = newcomer.place
        assert place is not None and place.is_new and place.generation == 3
        assert place.rank == {5: 4, 7: 5}[newcomer.number] and len(place.hosts) == 6
        assert own.decision is None
        newcomer.ask_for_state()
        own.look(10.0**newcomer.number)
    assert own.decision is not None
    assert own.decision.kept == [0, 1, 2, 3, -1, -1]
    assert own.decision.newcomers == [(4, 5), (5, 7)]


def test_a_process_that_has_gone_is_replaced(store: dist.Store, own: Recruits) -> None:
    found = [waiting(store, number)[0] for number in (4, 5)]
    look_until_places(own, found)
    for newcomer in found:
        newcomer.ask_for_state()
    own.look(1e6)
    planned = own.decision
    assert planned is not None
    found[1].close(has_joined=False)
    own.look(2e6)
    assert own.decision is None, "a place is open"
    third, _ = waiting(store, 6)
    clock = itertools.count(3e6, 0.1)

    def has_place() -> bool:
        own.look(next(clock))
        return third.place is not None

    wait_until(has_place, lambda: third)
    assert third.place is not None and found[1].place is not None
    assert third.place.rank == found[1].place.rank
    third.ask_for_state()
    own.look(9e6)
    assert own.decision is not None and own.decision != planned


def test_a_silent_process_is_not_asked_again(
    store: dist.Store, own: Recruits, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = dist.PrefixStore("spares", store)
    for number in (4, 5):  # they are silent from now on
        spares.Newcomer(store, number)._enter(HELLO)
    for now_s in range(30):
        own.look(float(now_s))
    assert keys.check(["gone/4", "gone/5"]) and own.decision is None
    newcomers = [waiting(store, number)[0] for number in (6, 7)]
    look_until_places(own, newcomers, 100.0)
