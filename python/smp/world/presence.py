"""Waiting in `smp.init` for ranks that have not come, together with those that have.

Liveness (`links`) begins when all ranks have come. Until then a rank that waits tells the others
through the store, again and again, that it is there; else one that is ended while it waits would
leave the others waiting until `SMP_TIMEOUT_S`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25
_PULSE_S = 3.0
# Without a pulse for so long a rank is gone, or stopped.
_SILENT_S = 30.0
_GONE = "gone"


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
    store: dist.Store, own_rank: int, keys: Sequence[str], timeout_s: float
) -> list[bytes]:
    """The values of keys, one per rank, once all are there. Ctrl-C ends it.

    Args:
        store: keys of this init.
        own_rank: of this process.
        keys: of all ranks, index = global rank.
        timeout_s: for all of them.

    Raises:
        RuntimeError: ranks did not come in time, or are gone again; names them.
    """
    pulses = _Pulses(store, own_rank, len(keys))
    deadline_s = time.monotonic() + timeout_s
    try:
        for key in keys:
            pause_s = _SHORTEST_PAUSE_S
            while not store.check([key]):  # a wait of the store hears no Ctrl-C
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                pulses.raise_if_gone()
                pulses.beat()
                if time.monotonic() < deadline_s:
                    continue
                missing = [rank for rank, k in enumerate(keys) if not store.check([k])]
                raise RuntimeError(
                    f"smp.init: ranks {missing} of {len(keys)} did not arrive within "
                    f"{timeout_s:g} s; check that all processes were started and call smp.init, or "
                    "raise SMP_TIMEOUT_S"
                )
    except dist.DistNetworkError as error:
        raise RuntimeError(
            f"smp.init: rank 0, which the ranks meet at, does not answer any more ({error}); look "
            "at its output"
        ) from None
    except RuntimeError:
        raise
    except BaseException as error:
        pulses.tell(
            f"rank {own_rank} was ended by {type(error).__name__} while it waited for other ranks"
        )
        raise
    return [store.get(key) for key in keys]
