"""Waiting in `smp.init` for ranks that have not come, together with those that have.

Liveness (`links`) begins when all ranks have come. Until then a rank that waits tells the others
through the store, again and again, that it is there; else one that is ended while it waits would
leave the others waiting until `SMP_TIMEOUT_S`.
"""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Callable, Sequence

import torch.distributed as dist

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25
_PULSE_S = 3.0
# Without a pulse for so long a rank is gone, or stopped.
_SILENT_S = 30.0
_GONE = "gone"
_ALL = "of all"
# For rank 0 to tell the others what came at the last moment.
_GRACE_S = 5.0


class _Pulses:
    """What the ranks that have come say, and which have fallen silent.

    Rank 0 looks after all, and all look after rank 0.
    """

    def __init__(self, store: dist.Store, own_rank: int, world_size: int) -> None:
        self._store, self._own_rank = store, own_rank
        self._watched = range(1, world_size) if own_rank == 0 else range(1)
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._num_pulses = 0
        self._next_s = 0.0

    def beat(self) -> None:
        """Says that this rank is there, and looks which others are, every few seconds."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _PULSE_S
        self._num_pulses += 1
        self._store.set(f"pulse/{self._own_rank}", str(self._num_pulses))
        for rank in self._watched:
            key = f"pulse/{rank}"
            if not self._store.check([key]):
                continue
            pulse = self._store.get(key)
            if rank not in self._seen or self._seen[rank][0] != pulse:
                self._seen[rank] = pulse, now_s
            elif now_s - self._seen[rank][1] > _SILENT_S:
                self.tell(
                    f"rank {rank} came and has said nothing for {_SILENT_S:g} s: it was killed, or "
                    "stopped, while it waited for other ranks"
                )

    def tell(self, text: str) -> None:
        """Ends the wait of all ranks."""
        self._store.set(_GONE, text)

    def raise_if_gone(self) -> None:
        """
        Raises:
            RuntimeError: some rank came and is gone.
        """
        if self._store.check([_GONE]):
            text = self._store.get(_GONE).decode()
            raise RuntimeError(f"smp.init: {text}; start all ranks again")


def wait_for_hellos(
    store: dist.Store,
    own_rank: int,
    keys: Sequence[str],
    timeout_s: float,
    look_at_first: Callable[[bytes], None] | None = None,
) -> list[bytes]:
    """The values of keys, one per rank, once all are there. Ctrl-C ends it. Collective.

    Rank 0 collects them and tells all others, so that the store is not asked once for each pair.

    Args:
        store: keys of this init.
        own_rank: of this process.
        keys: of all ranks, index = global rank; others in each call.
        timeout_s: for all of them.
        look_at_first: gets the value of rank 0 before others are waited for; may raise.

    Raises:
        RuntimeError: ranks did not come in time, or are gone again; names them.
    """
    pulses = _Pulses(store, own_rank, len(keys))
    deadline_s = time.monotonic() + timeout_s
    collected = f"{keys[0]}/{_ALL}"
    try:
        if own_rank == 0:
            _wait_for(store, keys, keys, pulses, deadline_s, timeout_s)
            texts = [text.decode() for text in store.multi_get(list(keys))]
            # Nearly the same text for each rank.
            packed = zlib.compress(json.dumps(texts).encode(), 1)
            store.set(collected, base64.b64encode(packed).decode())
            return [text.encode() for text in texts]
        _wait_for(store, keys[:1], keys, pulses, deadline_s, timeout_s)
        if look_at_first is not None:
            look_at_first(store.get(keys[0]))
        _wait_for(store, [collected], keys, pulses, deadline_s, timeout_s)
        packed = zlib.decompress(base64.b64decode(store.get(collected)))
    except dist.DistNetworkError as error:
        raise _no_answer(error) from None
    except (RuntimeError, ValueError):
        raise
    except BaseException as error:
        pulses.tell(
            f"rank {own_rank} was ended by {type(error).__name__} while it waited for other ranks"
        )
        raise
    return [text.encode() for text in json.loads(packed)]


def await_key(
    store: dist.Store, own_rank: int, world_size: int, key: str, timeout_s: float
) -> None:
    """Waits for what rank 0 says to all when they have come. Ctrl-C ends it.

    Args:
        store: keys of this init.
        own_rank: of this process.
        world_size: number of all ranks.
        key: that rank 0 sets.
        timeout_s: for rank 0.

    Raises:
        RuntimeError: rank 0 did not say it in time, or some rank is gone.
    """
    deadline_s = time.monotonic() + timeout_s
    pulses = _Pulses(store, own_rank, world_size)
    try:
        _wait_for(store, [key], [key], pulses, deadline_s, timeout_s)
    except dist.DistNetworkError as error:
        raise _no_answer(error) from None


def _no_answer(error: Exception) -> RuntimeError:
    return RuntimeError(
        f"smp.init: rank 0, which the ranks meet at, does not answer any more ({error}); look "
        "at its output"
    )


def tell_failure(store: dist.Store, own_rank: int, error: BaseException) -> None:
    """Ends the waits of the other ranks for this one, before liveness has begun."""
    try:
        store.set(_GONE, f"rank {own_rank} failed: {type(error).__name__}: {error}")
    except RuntimeError:  # the store is gone with the rank that has it
        pass


def _wait_for(
    store: dist.Store,
    wanted: Sequence[str],
    keys: Sequence[str],
    pulses: _Pulses,
    deadline_s: float,
    timeout_s: float,
) -> None:
    """Until all of ``wanted`` are there; ``keys`` say which ranks have come."""
    pause_s = _SHORTEST_PAUSE_S
    while not store.check(list(wanted)):  # a wait of the store hears no Ctrl-C
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        pulses.raise_if_gone()
        pulses.beat()
        if time.monotonic() < deadline_s:
            continue
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if not missing and time.monotonic() < deadline_s + _GRACE_S:
            continue  # all have come, and rank 0 is about to say so
        absent = missing or [0]  # which has not told
        raise RuntimeError(
            f"smp.init: ranks {absent} of {len(keys)} did not arrive within {timeout_s:g} s; check "
            "that all processes were started and call smp.init, or raise SMP_TIMEOUT_S"
        )
