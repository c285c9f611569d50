"""Waits in `smp.init` for missing ranks, together with those that have arrived.

Liveness (`links`) begins when all ranks have arrived. Until then a rank that waits sends a pulse
through the store every few seconds. Without pulses, a rank that is killed while it waits would
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
# A rank without a pulse for so long has ended, or is stopped.
_SILENT_S = 30.0
_GONE = "gone"
_ALL = "of all"
# Time for rank 0 to pass on values that arrived at the last moment.
_GRACE_S = 5.0


class _Pulses:
    """Pulses of the ranks that have arrived, which show silent ranks.

    Rank 0 watches all ranks, and all watch rank 0.
    """

    def __init__(self, store: dist.Store, own_rank: int, world_size: int) -> None:
        self._store, self._own_rank = store, own_rank
        self._watched = range(1, world_size) if own_rank == 0 else range(1)
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._num_pulses = 0
        self._next_s = 0.0

    def beat(self) -> None:
        """Sends a pulse and looks at those of other ranks, every few seconds."""
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
                self.end_waits(
                    f"rank {rank} came and has said nothing for {_SILENT_S:g} s: it was killed, or "
                    "stopped, while it waited for other ranks"
                )

    def end_waits(self, text: str) -> None:
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
    """Returns the values of keys, one per rank, once all are there. Ctrl-C ends it. Collective.

    Rank 0 collects them and publishes the list, so that the store is not asked once for each pair.

    Args:
        store: keys of this init.
        own_rank: global rank of this process.
        keys: key of each rank, index = global rank; each call needs new keys.
        timeout_s: time-out for all values, in seconds.
        look_at_first: receives the value of rank 0 before others are waited for; may raise.

    Raises:
        RuntimeError: ranks did not come in time, or have ended since; names them.
    """
    pulses = _Pulses(store, own_rank, len(keys))
    deadline_s = time.monotonic() + timeout_s
    collected = f"{keys[0]}/{_ALL}"
    try:
        if own_rank == 0:
            _wait_for(store, keys, keys, pulses, deadline_s, timeout_s)
            texts = [text.decode() for text in store.multi_get(list(keys))]
            # Texts of the ranks are nearly the same, so they compress well.
            packed = zlib.compress(json.dumps(texts).encode(), 1)
            store.set(collected, base64.b64encode(packed).decode())
            return [text.encode() for text in texts]
        _wait_for(store, keys[:1], keys, pulses, deadline_s, timeout_s)
        if look_at_first is not None:
            look_at_first(store.get(keys[0]))
        _wait_for(store, [collected], keys, pulses, deadline_s, timeout_s)
        packed = zlib.decompress(base64.b64decode(store.get(collected)))
    except dist.DistNetworkError as error:
        raise no_answer("smp.init: ", error) from None
    except (RuntimeError, ValueError):
        raise
    except BaseException as error:
        pulses.end_waits(
            f"rank {own_rank} was ended by {type(error).__name__} while it waited for other ranks"
        )
        raise
    return [text.encode() for text in json.loads(packed)]


def await_key(
    store: dist.Store,
    own_rank: int,
    world_size: int,
    key: str,
    timeout_s: float,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Waits for a value that rank 0 sets when all ranks have arrived. Ctrl-C ends it.

    Args:
        store: keys of this init.
        own_rank: global rank of this process.
        world_size: number of all ranks.
        key: key that rank 0 sets.
        timeout_s: time-out in seconds.
        look: function that is called again and again, and may raise to end the wait.

    Raises:
        RuntimeError: rank 0 did not set it in time, or some rank has ended.
    """
    deadline_s = time.monotonic() + timeout_s
    pulses = _Pulses(store, own_rank, world_size)
    try:
        _wait_for(store, [key], [key], pulses, deadline_s, timeout_s, look)
    except dist.DistNetworkError as error:
        raise no_answer("smp.init: ", error) from None


def no_answer(prefix: str, error: Exception) -> RuntimeError:
    """Returns the error of a rank that cannot reach the store in which the ranks have met.

    Args:
        prefix: beginning of the text.
        error: error of the store.
    """
    return RuntimeError(
        f"{prefix}the store in which the ranks meet does not answer any more ({error}): rank 0, "
        "torchrun's first agent or smp store has ended, or its host is cut off; look at its output"
    )


def tell_failure(store: dist.Store, own_rank: int, error: BaseException) -> None:
    """Ends the waits of the other ranks for this one, before liveness has begun."""
    try:
        store.set(_GONE, f"rank {own_rank} failed: {type(error).__name__}: {error}")
    except RuntimeError:  # the process with the store has ended
        pass


def _wait_for(
    store: dist.Store,
    wanted: Sequence[str],
    keys: Sequence[str],
    pulses: _Pulses,
    deadline_s: float,
    timeout_s: float,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Waits until all of ``wanted`` are there; ``keys`` show which ranks have arrived."""
    pause_s = _SHORTEST_PAUSE_S
    while not store.check(list(wanted)):  # a wait of the store ignores Ctrl-C
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        look()
        pulses.raise_if_gone()
        pulses.beat()
        if time.monotonic() < deadline_s:
            continue
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if not missing and time.monotonic() < deadline_s + _GRACE_S:
            continue  # all have arrived, and rank 0 is about to publish the list
        absent = missing or [0]  # which has not published it
        raise RuntimeError(
            f"smp.init: ranks {absent} of {len(keys)} did not arrive within {timeout_s:g} s; check "
            "that all processes were started and call smp.init, or raise SMP_TIMEOUT_S"
        )
