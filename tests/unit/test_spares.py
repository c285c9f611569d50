"""Offers of places to processes that wait, without these processes."""

from __future__ import annotations

import os
import subprocess
import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from smp.world import spares
from smp.world.processes import process_space
from smp.world.rendezvous import Hello
from smp.world.spares import Newcomer, Place, Spares, Waiting
from tests.patience import wait_until

HELLO = Hello(4, "node", "machine", "cpu", 0, {"microbatches": 2})
PLACE = Place(0, 0, [0, 1, 2, 3], [HELLO] * 4, [], ["node"] * 4)


@pytest.fixture(name="store")
def _store() -> dist.Store:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    return store


def ranks(store: dist.Store, expected: range, count: int = 2) -> list[Spares]:
    offers = dist.PrefixStore("survivors", store)
    return [Spares(Waiting(store, expected), offers, PLACE) for _ in range(count)]


def waiting(store: dist.Store, number: int) -> tuple[Newcomer, threading.Thread]:
    newcomer = Newcomer(store, number)
    thread = threading.Thread(target=newcomer.wait, args=(HELLO,), daemon=True)
    thread.start()
    return newcomer, thread


def agree(found: list[Spares], lost: list[set[int]]) -> list[dict[int, int]]:
    """Asks on all ranks until each has an answer."""
    answers: dict[int, dict[int, int]] = {}

    def have_answers() -> bool:
        for number, (own, known) in enumerate(zip(found, lost, strict=True)):
            answer = own.find(known)
            if answer is not None:
                answers[number] = answer
        return len(answers) == len(found)

    wait_until(have_answers, lambda: answers)
    return [answers[number] for number in range(len(found))]


def test_ranks_that_know_of_different_losses_agree(store: dist.Store) -> None:
    newcomers = [waiting(store, number) for number in (4, 5)]
    first, second = ranks(store, range(4, 6))

    def have_places() -> bool:
        assert first.find({3}) is None and second.find({3, 1}) is None
        return all(newcomer.place for newcomer, _ in newcomers)

    wait_until(have_places, lambda: newcomers)
    assert first.find({3}) is None, "nobody asks for a state yet"
    for newcomer, thread in newcomers:
        thread.join()
        newcomer.ask_for_state()
    answers = agree([first, second], [{3}, {3, 1}])
    assert answers[0] == answers[1] and set(answers[0]) == {1, 3}
    for newcomer, _ in newcomers:
        assert newcomer.place is not None and answers[0][newcomer.place.rank] == newcomer.number
        newcomer.close(has_joined=True)


def test_too_few_processes_are_a_decision_too(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spares, "_START_S", 0.2)
    waiting(store, 4)
    assert agree(ranks(store, range(4, 6)), [{3, 0}, {3}]) == [{}, {}]


def test_a_process_that_is_gone_is_replaced_and_others_keep_their_places(
    store: dist.Store,
) -> None:
    threads = [waiting(store, number) for number in (4, 5)]
    [own] = ranks(store, range(4, 6), 1)

    def somebody_has_the_place() -> bool:
        assert own.find({2}) is None
        return any(newcomer.place for newcomer, _ in threads)

    wait_until(somebody_has_the_place, lambda: threads)
    first = next(newcomer for newcomer, _ in threads if newcomer.place)
    first.close(has_joined=False)
    second = next(newcomer for newcomer, _ in threads if newcomer is not first)

    def has_the_place() -> bool:
        assert own.find({2}) is None
        return second.place is not None

    wait_until(has_the_place, lambda: second)
    second.ask_for_state()
    assert agree([own], [{2}]) == [{2: second.number}]
    second.close(has_joined=True)


def test_a_process_with_another_configuration_does_not_wait(store: dist.Store) -> None:
    store.set("hello/0", '{"world_size": 4, "host": "node", "machine": "machine", "device": "cpu", '
              '"num_devices": 0, "config": {"microbatches": 4}}')  # fmt: skip
    with pytest.raises(ValueError, match="microbatches=2: process 4, which waits .* has 4; pass"):
        Newcomer(store, 4).wait(HELLO)


def test_a_process_that_has_ended_is_not_asked(store: dist.Store) -> None:
    own, ended = Waiting(store, range(0)), subprocess.Popen(["true"])
    ended.wait()
    for number, pid in ((4, ended.pid), (5, os.getpid())):
        hello = replace(HELLO, pid=pid, process_space=process_space())
        Newcomer(store, number)._enter(hello)
    assert own.free() == [5] and own.is_gone(4) and not own.is_gone(5)
