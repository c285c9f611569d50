"""The thread of a rank that sends generations, one after the other."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from smp.checkpoint.locks import OwnerLock
from smp.checkpoint.store import sending
from smp.checkpoint.store.names import Key
from smp.checkpoint.store.objects import ObjectStore, Stopped
from smp.checkpoint.store.pending import Pending
from smp.checkpoint.store.sending import NotSent, Progress

_log = logging.getLogger("smp")
_POLL_S = 0.5
_JOIN_S = 5.0


@dataclass
class Upload:
    """One generation on its way, as this rank sees it.

    Attributes:
        pending: what is sent.
        lock: of the first rank, else None.
        keep: complete generations that stay in the store; None: all.
    """

    pending: Pending
    lock: OwnerLock | None
    keep: int | None
    progress: Progress = field(default_factory=Progress)


class Uploader:
    """Sends in the background; ranks meet in the folder and in the store only.

    Args:
        store: to send to; stops its transfers when `is_stopped` of this object says so.
        rank, num_ranks: of this process.
        prefix: in front of what is logged.
        timeout_s: for so long nothing may happen.
        fault: says why the job ends; None: it does not.
        held: generations that this job reads.
    """

    def __init__(
        self,
        store: ObjectStore,
        rank: int,
        num_ranks: int,
        prefix: str,
        timeout_s: float,
        fault: Callable[[], str | None],
        held: Callable[[], Set[Key]],
    ) -> None:
        self._store = store
        self._rank, self._num_ranks, self._prefix = rank, num_ranks, prefix
        self._timeout_s, self._fault, self._held = timeout_s, fault, held
        self._changed = threading.Condition()
        self._queue: deque[Upload] = deque()
        self._given_up: list[Upload] = []
        self._done: list[Key] = []
        self._errors: list[str] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, upload: Upload) -> None:
        """Sends it after those that were added before."""
        with self._changed:
            self._queue.append(upload)
            if self._thread is None:
                # Not in the way of the end of the process; smp.shutdown waits for it.
                self._thread = threading.Thread(target=self._run, name="smp-store", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def is_stopped(self) -> bool:
        """Asked by transfers."""
        return self._stop.is_set() or self._fault() is not None

    def waiting(self) -> list[Key]:
        """Generations that are not complete in the store, as far as this rank knows."""
        with self._changed:
            return [upload.pending.key for upload in (*self._given_up, *self._queue)]

    def wait(self, timeout_s: float | None) -> bool:
        """Waits until all that was added is complete in the store.

        Returns:
            False: it is not after ``timeout_s``, or the job has failed.

        Raises:
            RuntimeError: a generation was given up since the last call, and no newer one is
                complete that takes its place; says why.
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
        """Ends what runs; what is not complete stays for the next job."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(_JOIN_S)
            if thread.is_alive():
                return  # it has its locks until the process ends
        with self._changed:
            for upload in (*self._given_up, *self._queue):
                if upload.lock is not None:
                    upload.lock.release(delete=False)  # with the lock the next job finds it
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
            except Exception as error:  # of the folder: what failed cannot even be noted
                with self._changed:
                    self._errors.append(f"{upload.pending.folder}: {type(error).__name__}: {error}")
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()

    def _outcome(self, upload: Upload) -> str | None:
        """Sends; why it could not, or None."""
        try:
            self._send(upload)
        except Stopped:
            raise
        except Exception as caught:
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
                    self._errors.clear()  # of older ones, which a warning has told
            dropped = self._superseded(upload.keep)
        for old in dropped:
            if old.lock is not None:
                old.pending.delete()
                old.lock.release(delete=True)
                old.lock = None

    def _superseded(self, keep: int | None) -> list[Upload]:
        """Takes out what was given up and would be pruned now; else its links fill the disk."""
        if keep is None:
            return []
        keys = sorted([*self._done, *(upload.pending.key for upload in self._given_up)])
        stay = set(keys[-keep:])
        dropped = [upload for upload in self._given_up if upload.pending.key not in stay]
        self._given_up = [upload for upload in self._given_up if upload not in dropped]
        return dropped

    def _send(self, upload: Upload) -> None:
        pending, begin_s = upload.pending, time.monotonic()
        try:
            pending.wait_until_seen()
            sending.send_share(
                self._store, pending, self._rank, self._num_ranks, upload.progress, self._pause
            )
        except FileNotFoundError:
            if upload.lock is None and not pending.is_there():
                return  # the first rank found all of it in the store, or has settled it
            raise
        if upload.lock is None:
            self._wait_for_first(pending)
            return
        sending.complete(self._store, pending, lambda: self._pause(_POLL_S), self._timeout_s)
        self._prune(upload)
        pending.delete()
        upload.lock.release(delete=True)
        upload.lock = None
        seconds = time.monotonic() - begin_s
        _log.info("smp: %s is in %s (%.1f s)", pending.key.name, self._store.address, seconds)

    def _prune(self, upload: Upload) -> None:
        try:
            held = {*self._held(), *self.waiting()}
            sending.prune(self._store, upload.pending.key, upload.keep, held)
        except Exception as error:  # what was saved is there; the next one tries again
            _log.warning(
                "%sold checkpoints in %s could not be deleted: %s: %s",
                self._prefix,
                self._store.address,
                type(error).__name__,
                error,
            )

    def _wait_for_first(self, pending: Pending) -> None:
        """The first rank deletes it when it is complete, or says that it has given up."""
        while pending.is_there():
            if 0 in (failures := pending.failures()):
                raise NotSent(f"global_rank 0: {failures[0]}")
            self._pause(_POLL_S)

    def _give_up(self, upload: Upload, error: Exception) -> None:
        upload.pending.say_failed(self._rank, str(error))
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
