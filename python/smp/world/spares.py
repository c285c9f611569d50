"""Processes that wait for the place of a lost rank, and how the other ranks find one.

All meet in the store of `init`. A process that waits looks there a few times a second, and does
nothing else. Ranks that have stopped after a failure agree on an offer, which gives a process to
each place; it counts when these processes have built their models and ask for the state. See
docs/design/going_on.md.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch.distributed as dist

from smp.config.schema import config_error
from smp.config.sources import ReadConfig
from smp.world.launch import Launch, with_hosts
from smp.world.rendezvous import Hello, raise_first_error
from smp.world.shrinking import fill_places

_LOOK_S, _PULSE_S = 0.2, 0.5
_LOOK_FOR_ANSWERS_S = 0.03
# Time within which a process that waits answers if it lives, or comes if it has just started.
_ANSWER_S, _START_S = 10.0, 30.0
# A process without a pulse for so long has ended, or is stopped.
_SILENT_S = 10.0
_ASK = "ask"


def _open(store: dist.Store) -> dist.Store:
    return dist.PrefixStore("spares", store)


@dataclass(frozen=True)
class Place:
    """The place that a process takes.

    Attributes:
        rank: global rank that is lost.
        generation: number of times that the ranks were connected again before.
        launched: see `Runtime`.
        hellos: hello of each rank, index = global rank.
        keepers: see `Rank`.
    """

    rank: int
    generation: int
    launched: list[int]
    hellos: list[Hello]
    keepers: list[int]


class Spares:
    """Finds processes for the places of lost ranks. One object per set of ranks and failure.

    Args:
        store: keys of this `init`.
        offers: keys of these ranks alone.
        numbers: numbers that the launcher gave to the processes that wait.
        place: place of rank 0 among these ranks; that of each other one differs in `rank` only.
    """

    def __init__(
        self, store: dist.Store, offers: dist.Store, numbers: Sequence[int], place: Place
    ) -> None:
        self._store, self._offers = _open(store), dist.PrefixStore("offers", offers)
        self._numbers, self._place = list(numbers), place
        self._token = str(place.generation)
        self._asked_s: float | None = None
        self._next_s = 0.0
        self._num_offers = 0
        self._offer: dict[int, int] | None = None
        self._seen: dict[int, tuple[bytes, float]] = {}

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
            self._store.set(_ASK, self._token)
        self._read_offers()
        offer = self._offer
        if offer is None or (offer and not self._counts(offer, lost)):
            self._make_offer(lost)
            return None
        is_ready = all(self._has(f"ready/{spare}") for spare in offer.values())
        return offer if is_ready else None

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _read_offers(self) -> None:
        while self._offers.check([str(self._num_offers)]):
            told = json.loads(self._offers.get(str(self._num_offers)))
            self._num_offers += 1
            self._offer = {int(rank): spare for rank, spare in told.items()}
            for rank, spare in self._offer.items():
                place = {**asdict(self._place), "rank": rank}
                self._store.set(f"take/{spare}", json.dumps(place))

    def _counts(self, offer: dict[int, int], lost: Collection[int]) -> bool:
        return set(lost) <= set(offer) and not any(map(self._is_gone, offer.values()))

    def _make_offer(self, lost: Collection[int]) -> None:
        before = {} if self._offer is None else self._offer
        alive = {rank: spare for rank, spare in before.items() if not self._is_gone(spare)}
        free = self._free()
        if free is None:
            return
        found = fill_places({*lost, *before}, alive, free)
        self._offers.compare_set(str(self._num_offers), "", json.dumps(found))

    def _free(self) -> list[int] | None:
        """Returns the processes that wait; None: some may answer yet."""
        assert self._asked_s is not None
        waited_s = time.monotonic() - self._asked_s
        free = []
        for spare in self._numbers:
            if self._has(f"take/{spare}"):
                continue
            answer = f"here/{spare}"
            if self._has(answer) and self._store.get(answer).decode() == self._token:
                free.append(spare)
            elif waited_s < (_ANSWER_S if self._has(f"hello/{spare}") else _START_S):
                return None
        return free

    def _is_gone(self, spare: int) -> bool:
        pulse = self._store.get(f"pulse/{spare}") if self._has(f"pulse/{spare}") else b""
        now_s = time.monotonic()
        if spare not in self._seen or self._seen[spare][0] != pulse:
            self._seen[spare] = pulse, now_s
        return self._has(f"gone/{spare}") or now_s - self._seen[spare][1] > _SILENT_S


def hello_of(store: dist.Store, number: int) -> Hello:
    """Returns the hello of a process that waits or has waited.

    Args:
        store: keys of this `init`.
        number: number that the launcher gave to it.
    """
    return Hello(**json.loads(_open(store).get(f"hello/{number}")))


@dataclass
class Newcomer:
    """A process that waits, and then takes the place of a lost rank.

    Attributes:
        number: number that the launcher gave to this process.
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
        """
        store, is_compared, answered = _open(self.store), False, b""
        store.set(f"hello/{self.number}", json.dumps(asdict(own)))
        while not store.check([f"take/{self.number}"]):
            if not is_compared and self.store.check(["hello/0"]):
                is_compared = True
                first = Hello(**json.loads(self.store.get("hello/0")))
                _compare(self.number, own.config or {}, first.config or {})
            if store.check([_ASK]) and (token := store.get(_ASK)) != answered:
                answered = token
                store.set(f"here/{self.number}", token.decode())
            time.sleep(_LOOK_S)
        told = json.loads(store.get(f"take/{self.number}"))
        told["hellos"] = [Hello(**hello) for hello in told["hellos"]]
        self._thread = threading.Thread(target=self._pulse, name="smp-newcomer", daemon=True)
        self._thread.start()
        self.place = Place(**told)
        return self.place

    def _pulse(self) -> None:
        store, number = _open(self.store), 0
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


def wait_for_place(
    store: dist.Store, launch: Launch, hello: Hello, read: ReadConfig
) -> tuple[Newcomer, Launch]:
    """Waits, in a process that was started for that, for the place of a lost rank.

    Args:
        store: keys of this `init`.
        launch: launch of this process.
        hello: message that a rank would send to the others.
        read: configuration of this process.

    Returns:
        the process with its place, and the launch of a rank with this place.

    Raises:
        ValueError: the configuration is wrong, has no use for it, or is not that of the ranks.
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
    hosts = [other.host for other in place.hellos]
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
