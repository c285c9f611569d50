"""Runs the thread of a rank that sends generations, one after the other."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from smp.checkpoint.locks import OwnerLock
from smp.checkpoint.store import sending
from smp.checkpoint.store.names import Key
from smp.checkpoint.store.nodes import Node
from smp.checkpoint.store.objects import ObjectStore, Stopped
from smp.checkpoint.store.pending import Pending
from smp.checkpoint.store.sending import NotSent, Progress

if TYPE_CHECKING:
    from smp.checkpoint.store.node_parts import NodeFailures

_log = logging.getLogger("smp")
_POLL_S = 0.5
_JOIN_S = 5.0


@dataclass
class Upload:
    """A generation that this rank sends its share of.

    Attributes:
        pending: generation to send.
        lock: lock of the generation on the first rank of a folder, else None.
        keep: number of complete generations that stay in the store; None: all.
        completes: whether this rank writes the manifest, if it has the lock.
        progress: progress of this rank.
    """

    pending: Pending
    lock: OwnerLock | None
    keep: int | None
    completes: bool = True
    progress: Progress = field(default_factory=Progress)


class Uploader:
    """Sends generations in the background.

    Ranks communicate through the folder, the store, and, if hosts have folders of their own, the
    store in which they have met.

    Args:
        store: store to send to; stops its transfers when `is_stopped` returns True.
        node: ranks that share the folder of the generations.
        prefix: text in front of log messages.
        timeout_s: seconds without progress after which a generation is given up.
        fault: returns the reason why the job ends, or None.
        held: returns the generations that this job reads.
        told: called on the first rank with a generation that is complete in the store, and the
            seconds that this took.
        exchange: returns the exchange of failures between hosts for a generation; None: all ranks
            share the folder.
    """

    def __init__(
        self,
        store: ObjectStore,
        node: Node,
        prefix: str,
        timeout_s: float,
        fault: Callable[[], str | None],
        held: Callable[[], Set[Key]],
        told: Callable[[Key, float], None] = lambda key, seconds: None,
        exchange: Callable[[Key], NodeFailures] | None = None,
    ) -> None:
        self._store, self._exchange = store, exchange
        self._node, self._prefix = node, prefix
        self._timeout_s, self._fault, self._held = timeout_s, fault, held
        self._told = told
        self._changed = threading.Condition()
        self._queue: deque[Upload] = deque()
        self._given_up: list[Upload] = []
        self._done: list[Key] = []
        self._errors: list[str] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, upload: Upload) -> None:
        """Queues a generation to be sent after those that were added before."""
        with self._changed:
            self._queue.append(upload)
            if self._thread is None:
                # A daemon, so that it does not hold up the end of the process; smp.shutdown waits.
                self._thread = threading.Thread(target=self._run, name="smp-store", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def keep(self, part: Upload) -> None:
        """Keeps a part that cannot be sent in this job, like a generation that was given up."""
        with self._changed:
            self._given_up.append(part)

    def is_stopped(self) -> bool:
        """Returns whether transfers are to stop."""
        return self._stop.is_set() or self._fault() is not None

    def waiting(self) -> list[Key]:
        """Returns generations that this rank has not seen complete in the store."""
        with self._changed:
            return [upload.pending.key for upload in (*self._given_up, *self._queue)]

    def wait(self, timeout_s: float | None) -> bool:
        """Waits until all added generations are complete in the store.

        Returns:
            True; False if some are not after ``timeout_s``, or if the job has failed.

        Raises:
            RuntimeError: a generation was given up since the last call, and no newer complete one
                replaces it; the text has the reason.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while self._queue and not self.is_stopped():
                left_s = _POLL_S if deadline is None else min(_POLL_S, deadline - time.monotonic())
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
            errors, self._errors = self._errors, []
            is_over = not self._queue
        if errors:
            raise RuntimeError("; ".join(errors))
        return is_over

    def stop(self) -> None:
        """Ends running transfers; incomplete generations stay for the next job."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(_JOIN_S)
            if thread.is_alive():
                return  # the thread keeps its locks until the process ends
        with self._changed:
            for upload in (*self._given_up, *self._queue):
                if upload.lock is not None:
                    upload.lock.release(delete=False)  # the lock shows the next job what is left
            self._queue.clear()
            self._given_up.clear()

    # ---- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._stop.is_set():
                    self._changed.wait(_POLL_S)
                if self._stop.is_set():
                    return
                upload = self._queue[0]
            try:
                self._settle(upload, self._outcome(upload))
            except Stopped:
                return
            except Exception as error:  # the folder fails, so the failure cannot be recorded there
                with self._changed:
                    self._errors.append(f"{upload.pending.folder}: {type(error).__name__}: {error}")
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()

    def _outcome(self, upload: Upload) -> str | None:
        """Sends a generation; returns the reason if it could not, else None."""
        exchange = None if self._exchange is None else self._exchange(upload.pending.key)

        def elsewhere() -> Mapping[int, str]:
            with contextlib.suppress(RuntimeError):  # rank 0, which may hold this store, has left
                return {} if exchange is None else exchange.elsewhere()
            return {}

        try:
            self._send(upload, elsewhere)
        except Stopped:
            raise
        except Exception as caught:
            if exchange is not None and upload.lock is not None and not elsewhere():
                own = {self._node.rank: str(caught)}
                with contextlib.suppress(RuntimeError):
                    exchange.publish(upload.pending.failures() or own)
            self._give_up(upload, caught)
            return f"{upload.pending.key.name} is not in {self._store.address}: {caught}"
        return None

    def _settle(self, upload: Upload, error: str | None) -> None:
        with self._changed:
            if error is not None:
                self._errors.append(error)
                self._given_up.append(upload)
            else:
                self._done.append(upload.pending.key)
                if upload.keep is not None:
                    self._errors.clear()  # errors of older ones, which were logged
            dropped = self._superseded(upload.keep)
        for old in dropped:
            if old.lock is not None:
                old.pending.delete()
                old.lock.release(delete=True)
                old.lock = None

    def _superseded(self, keep: int | None) -> list[Upload]:
        """Removes given-up generations that would be pruned now: their links fill the disk."""
        if keep is None:
            return []
        keys = sorted([*self._done, *(upload.pending.key for upload in self._given_up)])
        stay = set(keys[-keep:])
        dropped = [upload for upload in self._given_up if upload.pending.key not in stay]
        self._given_up = [upload for upload in self._given_up if upload not in dropped]
        return dropped

    def _send(self, upload: Upload, elsewhere: Callable[[], Mapping[int, str]]) -> None:
        pending, begin_s = upload.pending, time.monotonic()
        try:
            pending.wait_until_seen()
            ranks = self._node.ranks
            sending.send_share(
                self._store,
                pending,
                ranks.index(self._node.rank),
                len(ranks),
                upload.progress,
                self._pause,
            )
        except FileNotFoundError:
            if upload.lock is None and not pending.is_there():
                return  # the first rank found all of it in the store, or has settled it
            raise
        if upload.lock is None:
            self._wait_for_first(pending)
            return
        finish = sending.complete if upload.completes else sending.wait_until_complete
        wait = partial(self._pause, _POLL_S)
        finish(self._store, pending, wait, self._timeout_s, elsewhere)
        if upload.completes:
            self._prune(upload)
        pending.delete()
        upload.lock.release(delete=True)
        upload.lock = None
        if not upload.completes:
            return
        seconds = time.monotonic() - begin_s
        _log.info("smp: %s is in %s (%.1f s)", pending.key.name, self._store.address, seconds)
        self._told(pending.key, seconds)

    def _prune(self, upload: Upload) -> None:
        try:
            held = {*self._held(), *self.waiting()}
            sending.prune(self._store, upload.pending.key, upload.keep, held)
        except Exception as error:  # the new generation is complete; the next save prunes again
            _log.warning(
                "%sold checkpoints in %s could not be deleted: %s: %s",
                self._prefix,
                self._store.address,
                type(error).__name__,
                error,
            )

    def _wait_for_first(self, pending: Pending) -> None:
        """Waits until the first rank deletes the pending generation or records a failure."""
        while pending.is_there():
            if (first := self._node.leader) in (failures := pending.failures()):
                raise NotSent(f"global_rank {first}: {failures[first]}")
            self._pause(_POLL_S)

    def _give_up(self, upload: Upload, error: Exception) -> None:
        upload.pending.say_failed(self._node.rank, str(error))
        _log.warning(
            "%s%s is complete in its folder, but not in %s: %s. Training goes on; the next job "
            "that uses this folder sends what is missing (%s)",
            self._prefix,
            upload.pending.key.name,
            self._store.address,
            error,
            upload.pending.folder,
        )

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            if self._stop.wait(min(left_s, _POLL_S)) or self.is_stopped():
                raise Stopped
