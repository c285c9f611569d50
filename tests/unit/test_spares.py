"""Offers of places to processes that wait, without these processes."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from dataclasses import asdict, replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from smp.world import spares
from smp.world.launch import Launch
from smp.world.processes import process_space
from smp.world.rendezvous import Hello
from smp.world.spares import Newcomer, Place, Spares, Waiting, claim_number
from tests.patience import wait_until

HELLO = Hello(4, "node", "machine", "cpu", 0, {"microbatches": 2})
PLACE = Place(0, 0, [0, 1, 2, 3], [HELLO] * 4, [], ["node"] * 4)


@pytest.fixture(name="store")
def _store() -> dist.Store:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    return store


def ranks(
    store: dist.Store, expected: range, count: int = 2, patience_s: float = 0.0
) -> list[Spares]:
    offers = dist.PrefixStore("survivors", store)
    return [Spares(Waiting(store, expected), offers, PLACE, patience_s) for _ in range(count)]


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


def test_ranks_wait_for_a_process_that_is_started_after_the_failure(store: dist.Store) -> None:
    [own] = ranks(store, range(0), 1, patience_s=60.0)
    for _ in range(3):
        assert own.find({3}) is None
        time.sleep(2 * spares._LOOK_FOR_ANSWERS_S)
    newcomer, thread = waiting(store, 4)

    def has_a_place() -> bool:
        assert own.find({3}) is None
        return newcomer.place is not None

    wait_until(has_a_place, lambda: newcomer)
    thread.join()
    newcomer.ask_for_state()
    assert agree([own], [{3}]) == [{3: 4}]
    newcomer.close(has_joined=True)


def test_a_late_process_has_time_to_answer(store: dist.Store) -> None:
    own = Waiting(store, range(0))
    Newcomer(store, 4)._enter(replace(HELLO, pid=os.getpid(), process_space=process_space()))
    long_ago = 2 * spares._ANSWER_S
    assert own.answers("0", 1, long_ago) is None
    assert own.answers("0", 1, long_ago + spares._ANSWER_S) == []


def test_numbers_are_claimed_once(store: dist.Store) -> None:
    first = Launch("slurm", 1, 4, 1, 4, "node", spares=2)
    found = [claim_number(store, one).global_rank for one in [first] * 3]
    assert found == [1, 6, 7], "4 and 5 are those that wait from the beginning"
    late = replace(first, global_rank=6)
    assert claim_number(store, late).global_rank == 8
    with pytest.raises(RuntimeError, match='was rank 1 of this job.*on_failure="spare"'):
        claim_number(store, replace(first, spares=None))


def test_a_process_that_waits_ends_with_the_job(
    store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Waiting(store, range(0))
    own.beat(0.0)
    own.end()
    with pytest.raises(SystemExit) as ended:
        Newcomer(store, 4).wait(HELLO)
    assert ended.value.code == 0 and "process 4 was not needed" in capsys.readouterr().out


def test_a_process_does_not_wait_for_a_dead_job(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spares, "_DEAD_S", 0.3)
    Waiting(store, range(0)).beat(0.0)
    with pytest.raises(RuntimeError, match="has said nothing for 0.3 s.*SMP_RENDEZVOUS"):
        Newcomer(store, 4).wait(HELLO)


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


def test_a_process_of_a_job_of_another_size_does_not_wait(store: dist.Store) -> None:
    store.set("hello/0", json.dumps(asdict(HELLO)))
    with pytest.raises(ValueError, match="process 5, .* a job of 3 ranks, and rank 0 for one of 4"):
        Newcomer(store, 5).wait(replace(HELLO, world_size=3))


def test_a_process_that_has_ended_is_not_asked(store: dist.Store) -> None:
    own, ended = Waiting(store, range(0)), subprocess.Popen(["true"])
    ended.wait()
    for number, pid in ((4, ended.pid), (5, os.getpid())):
        hello = replace(HELLO, pid=pid, process_space=process_space())
        Newcomer(store, number)._enter(hello)
    assert own.free() == [5] and own.is_gone(4) and not own.is_gone(5)
