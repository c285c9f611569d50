"""Processes that wait for a place among the ranks, and how the ranks find them.

All meet in the store of `init`, where a process that waits enters itself, at the start of the job
or later. It looks there a few times a second, and does nothing else. A process waits if the
launcher has started it for that, or if another one has the rank that the launcher gave to it.
Ranks that have stopped after a failure agree on an offer, which gives a process to each place; it
counts when these processes have built their models and ask for the state. See
docs/design/going_on.md.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch.distributed as dist

import smp._C as _C
from smp.config.schema import config_error
from smp.config.sources import ReadConfig
from smp.world.launch import Launch, with_hosts
from smp.world.presence import no_answer
from smp.world.processes import has_ended
from smp.world.rendezvous import Hello, raise_first_error
from smp.world.shrinking import fill_places

_LOOK_S, _PULSE_S = 0.2, 0.5
_LOOK_FOR_ANSWERS_S = 0.03
# Time within which a process that waits answers if it lives, or comes if it has just started.
_ANSWER_S, _START_S = 10.0, 30.0
# A process without a pulse for so long has ended, or is stopped.
_SILENT_S = 10.0
# Rank 0 says that often that the job lives. A process that has heard nothing for so long ends.
_ALIVE_S, _DEAD_S = 5.0, 120.0
_ASK, _ALIVE, _OVER = "ask", "alive", "over"


def _open(store: dist.Store) -> dist.Store:
    return dist.PrefixStore("spares", store)


@dataclass(frozen=True)
class Place:
    """The place that a process takes.

    Attributes:
        rank: global rank from now on.
        generation: number of times that the ranks were connected again before.
        launched: see `Runtime`; of the ranks before.
        hellos: hello of each rank before.
        keepers: see `Rank`.
        hosts: host of each rank from now on, index = global rank.
    """

    rank: int
    generation: int
    launched: list[int]
    hellos: list[Hello]
    keepers: list[int]
    hosts: list[str]

    @property
    def is_new(self) -> bool:
        """True if it is a place of a replica that is added, false if its rank was lost."""
        return len(self.hosts) > len(self.hellos)


def claim_number(store: dist.Store, launch: Launch) -> Launch:
    """Claims the number that the launcher gave to this process, or the next that is free.

    So a process with the rank of a lost one waits: launchers start it to replace the other.

    Args:
        store: keys of this `init`.
        launch: launch of this process.

    Returns:
        the launch of this process, perhaps with another number.

    Raises:
        RuntimeError: another process has this number, and no process of this job may wait.
    """
    keys, number = _open(store), launch.global_rank
    own = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4()}"
    while keys.compare_set(f"number/{number}", "", own) != own.encode():
        if launch.spares is None:
            raise RuntimeError(
                f"smp launch: another process was rank {number} of this job already; to let this "
                'one take a place, set on_failure="spare" and SMP_SPARES=0 in all processes'
            )
        number = max(number + 1, launch.first_size + launch.spares)
    return replace(launch, global_rank=number)


class Waiting:
    """The processes that wait, as ranks see them.

    Args:
        store: keys of this `init`.
        expected: numbers of the processes that are started with the ranks.
    """

    def __init__(self, store: dist.Store, expected: range) -> None:
        self.store, self._keys = store, _open(store)
        self._absent = set(expected)
        self._num_entered, self._open = 0, list[int]()
        self._first_looks_s: dict[tuple[str, int], float] = {}
        self._num_beats, self._next_beat_s = 0, 0.0
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._hellos: dict[int, Hello] = {}

    def free(self) -> list[int]:
        """Returns the processes that have begun to wait and have neither a place nor ended."""
        while self._has(f"entered/{self._num_entered}"):
            self._open.append(int(self._keys.get(f"entered/{self._num_entered}")))
            self._absent.discard(self._open[-1])
            self._num_entered += 1
        self._open = [n for n in self._open if not (self._has(f"take/{n}") or self._has_gone(n))]
        return list(self._open)

    def ask(self, token: str) -> None:
        """Asks all for an answer.

        Args:
            token: text that is new.
        """
        self._keys.set(_ASK, token)

    def answers(self, token: str, num_wanted: int, waited_s: float) -> list[int] | None:
        """Returns the processes that have answered.

        Args:
            token: text of the question.
            num_wanted: number of processes that are enough.
            waited_s: seconds since the question.

        Returns:
            their numbers; None: fewer than wanted, and some may answer yet.
        """
        found, may_come = list[int](), False
        for number in self.free():
            first_s = self._first_looks_s.setdefault((token, number), waited_s)
            if self._has(f"here/{number}") and self._keys.get(f"here/{number}").decode() == token:
                found.append(number)
            elif waited_s - first_s < _ANSWER_S:
                may_come = True
            else:
                self._keys.set(f"gone/{number}", "")  # the next question does not wait for it
        if waited_s < _START_S:
            may_come |= bool(self._absent)
        return None if may_come and len(found) < num_wanted else found

    def offer(self, number: int, place: Place) -> bool:
        """Gives a place to a process, unless it has another one. May be called again.

        Args:
            number: number that the launcher gave to the process.
            place: the place.

        Returns:
            whether the process has this place.
        """
        has = _read_place(self._keys.compare_set(f"take/{number}", "", json.dumps(asdict(place))))
        same = (has.rank, has.generation, has.is_new)
        return same == (place.rank, place.generation, place.is_new)

    def is_ready(self, number: int) -> bool:
        """Returns whether a process with a place asks for its state."""
        return self._has(f"ready/{number}")

    def is_gone(self, number: int) -> bool:
        """Returns whether a process with a place has ended, or is silent."""
        key, now_s = f"pulse/{number}", time.monotonic()
        pulse = self._keys.get(key) if self._has(key) else b""
        if number not in self._seen or self._seen[number][0] != pulse:
            self._seen[number] = pulse, now_s
        return self._has_gone(number) or now_s - self._seen[number][1] > _SILENT_S

    def beat(self, now_s: float) -> None:
        """Tells processes that wait that the job lives, if that is due. For rank 0.

        Args:
            now_s: present time.
        """
        if now_s >= self._next_beat_s:
            self._next_beat_s, self._num_beats = now_s + _ALIVE_S, self._num_beats + 1
            self._keys.set(_ALIVE, f"{os.getpid()} {self._num_beats}")

    def end(self) -> None:
        """Tells processes that wait that the job has ended and needs them no more."""
        self._keys.set(_OVER, "")

    def _has_gone(self, number: int) -> bool:
        if self._has(f"gone/{number}"):
            return True
        if number not in self._hellos:
            self._hellos[number] = hello_of(self.store, number)
        return has_ended(self._hellos[number].pid, self._hellos[number].process_space)

    def _has(self, key: str) -> bool:
        return bool(self._keys.check([key]))


class Spares:
    """Finds processes for the places of lost ranks. One object per set of ranks and failure.

    Args:
        waiting: processes that wait.
        offers: keys of these ranks alone.
        place: place of rank 0 among these ranks; that of each other one differs in `rank` only.
        patience_s: time in which processes may still come that are started after a failure.
    """

    def __init__(
        self, waiting: Waiting, offers: dist.Store, place: Place, patience_s: float
    ) -> None:
        self.waiting, self.patience_s = waiting, patience_s
        self._offers = dist.PrefixStore("offers", offers)
        self._place = place
        self._token = str(place.generation)
        self._asked_s: float | None = None
        self._next_s = 0.0
        self._num_offers = 0
        self._offer: dict[int, int] | None = None
        self._refused = set[int]()  # processes that have other places

    def find(self, lost: Collection[int]) -> dict[int, int] | None:
        """Looks for processes for lost ranks, and agrees with the other ranks on them.

        Args:
            lost: global ranks that are lost, as far as this rank knows.

        Returns:
            number of the process for each lost rank, all of which ask for their state; empty: too
            few are left; None: not known yet, ask again.
        """
        now_s = time.monotonic()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + _LOOK_FOR_ANSWERS_S
        if self._asked_s is None:
            self._asked_s = now_s
            self.waiting.ask(self._token)
        self._read_offers()
        offer = self._offer
        if offer is None or (offer and not self._counts(offer, lost)):
            self._make_offer(lost, now_s - self._asked_s)
            return None
        is_ready = all(map(self.waiting.is_ready, offer.values()))
        return offer if is_ready else None

    def _read_offers(self) -> None:
        while self._offers.check([str(self._num_offers)]):
            told = json.loads(self._offers.get(str(self._num_offers)))
            self._num_offers += 1
            self._offer = {int(rank): spare for rank, spare in told.items()}
            for rank, spare in self._offer.items():
                if not self.waiting.offer(spare, replace(self._place, rank=rank)):
                    self._refused.add(spare)

    def _counts(self, offer: dict[int, int], lost: Collection[int]) -> bool:
        return set(lost) <= set(offer) and not any(map(self._is_gone, offer.values()))

    def _is_gone(self, spare: int) -> bool:
        return spare in self._refused or self.waiting.is_gone(spare)

    def _make_offer(self, lost: Collection[int], waited_s: float) -> None:
        before = {} if self._offer is None else self._offer
        alive = {rank: spare for rank, spare in before.items() if not self._is_gone(spare)}
        places = {*lost, *before}
        free = self.waiting.answers(self._token, len(places) - len(alive), waited_s)
        if free is None:
            return
        found = fill_places(places, alive, free)
        if not found and waited_s < self.patience_s:
            return
        self._offers.compare_set(str(self._num_offers), "", json.dumps(found))


def hello_of(store: dist.Store, number: int) -> Hello:
    """Returns the hello of a process that waits or has waited.

    Args:
        store: keys of this `init`.
        number: number that the launcher gave to it.
    """
    return Hello(**json.loads(_open(store).get(f"hello/{number}")))


@dataclass
class Newcomer:
    """A process that waits, and then takes a place among the ranks.

    Attributes:
        number: number of this process.
        place: the place, once there is one.
    """

    store: dist.Store
    number: int
    place: Place | None = None
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def wait(self, own: Hello) -> Place:
        """Waits until this process is needed. Ends with the process if it is not.

        Raises:
            ValueError: the configuration is not that of the ranks.
            RuntimeError: the job is silent, or this process was silent for too long.
            SystemExit: the job has ended.
        """
        try:
            self._wait(own)
        except dist.DistError as error:
            raise no_answer("smp.init: ", error) from None
        self._thread = threading.Thread(target=self._pulse, name="smp-newcomer", daemon=True)
        self._thread.start()
        self.place = _read_place(_open(self.store).get(f"take/{self.number}"))
        return self.place

    def _wait(self, own: Hello) -> None:
        store, is_compared, answered = _open(self.store), False, b""
        heard, heard_s = b"", time.monotonic()
        self._enter(own)
        while not store.check([f"take/{self.number}"]):
            if not is_compared and self.store.check(["hello/0"]):
                is_compared = True
                first = Hello(**json.loads(self.store.get("hello/0")))
                if own.world_size != first.world_size:
                    raise ValueError(
                        f"smp launch: process {self.number}, which waits for a place, was started "
                        f"for a job of {own.world_size} ranks, and rank 0 for one of "
                        f"{first.world_size}; give it the variables of the ranks (WORLD_SIZE, "
                        "SMP_SPARES)"
                    )
                _compare(self.number, own.config or {}, first.config or {})
            if store.check([_ASK]) and (token := store.get(_ASK)) != answered:
                answered = token
                store.set(f"here/{self.number}", token.decode())
            self.check_wanted()
            if store.check([_OVER]):
                print(
                    f"smp: the job has ended, process {self.number} was not needed; another job "
                    "needs a place of its own to meet (SMP_RENDEZVOUS)",
                    flush=True,
                )
                raise SystemExit(0)
            if store.check([_ALIVE]) and (sign := store.get(_ALIVE)) != heard:
                heard, heard_s = sign, time.monotonic()
            if heard and time.monotonic() - heard_s > _DEAD_S:
                raise RuntimeError(
                    f"smp launch: process {self.number} waits for a place in a job that has said "
                    f"nothing for {_DEAD_S:g} s, and has probably failed; to start another job, "
                    "let it meet elsewhere (SMP_RENDEZVOUS)"
                )
            time.sleep(_LOOK_S)

    def _enter(self, own: Hello) -> None:
        """Enters this process in the list of those that wait."""
        store = _open(self.store)
        store.set(f"hello/{self.number}", json.dumps(asdict(own)))
        index, number = 0, str(self.number)
        while store.compare_set(f"entered/{index}", "", number) != number.encode():
            index += 1

    def check_wanted(self) -> None:
        """Raises RuntimeError if the ranks have not heard of this process for too long."""
        if _open(self.store).check([f"gone/{self.number}"]):
            raise RuntimeError(
                f"{_C.rank_prefix()}process {self.number}, which waits for a place, was silent for "
                f"more than {_ANSWER_S:g} s, and the ranks do not count on it any more; start "
                "another one"
            )

    def _pulse(self) -> None:
        store, number = _open(self.store), 0
        with suppress(dist.DistError):  # the store is gone, as the main thread finds out
            while not self._is_over.wait(_PULSE_S):
                number += 1
                store.set(f"pulse/{self.number}", str(number))

    def ask_for_state(self) -> None:
        """Tells the other ranks that this process has built its models."""
        _open(self.store).set(f"ready/{self.number}", "")

    def close(self, has_joined: bool) -> None:
        """Ends the thread; tells the other ranks if this process does not join them."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        if not has_joined:
            _open(self.store).set(f"gone/{self.number}", "")


def _read_place(text: bytes) -> Place:
    told = json.loads(text)
    told["hellos"] = [Hello(**hello) for hello in told["hellos"]]
    return Place(**told)


def wait_for_place(
    store: dist.Store, launch: Launch, hello: Hello, read: ReadConfig
) -> tuple[Newcomer, Launch]:
    """Waits, in a process that was started for that, for a place among the ranks.

    Args:
        store: keys of this `init`.
        launch: launch of this process.
        hello: message that a rank would send to the others.
        read: configuration of this process.

    Returns:
        the process with its place, and the launch of a rank with this place.

    Raises:
        ValueError: the configuration is wrong, has no use for it, or is not that of the ranks.
        RuntimeError: see `Newcomer.wait`.
    """
    raise_first_error([hello.error])
    policy = None if read.config is None else read.config.on_failure
    if policy != "spare":
        raise config_error(
            "on_failure",
            policy,
            "this process was started to wait for the place of a lost rank (smp run --spares)",
            'set on_failure="spare", or start the job without --spares',
        )
    newcomer = Newcomer(store, launch.global_rank)
    place = newcomer.wait(hello)
    hosts = list(place.hosts)
    hosts[place.rank] = hello.host
    launch = replace(launch, global_rank=place.rank, world_size=len(hosts))
    return newcomer, with_hosts(launch, hosts)


def _compare(number: int, own: dict[str, Any], first: dict[str, Any]) -> None:
    for key, value in own.items():
        if first.get(key) != value:
            raise config_error(
                key,
                value,
                f"process {number}, which waits for the place of a lost rank, differs from rank 0, "
                f"which has {first.get(key)!r}",
                "pass the same configuration to smp.init in all processes",
            )
