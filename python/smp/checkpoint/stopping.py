"""Saves checkpoints of ranks that are to stop."""

from __future__ import annotations

import logging
import time
from typing import Any

from smp.checkpoint.handle import running
from smp.checkpoint.saving import save_checkpoint
from smp.checkpoint.store import names
from smp.checkpoint.store.job import store_of, stores_in_use
from smp.world import runtime

_log = logging.getLogger("smp")


class StoppingSaver:
    """The `preemption.Saver` of this library."""

    def prepare(self, current: runtime.Runtime, path: str) -> None:
        """Checks the store of an address, the first time.

        Raises:
            RuntimeError: the store cannot be used; the text has the reason.
        """
        if not names.is_address(path):
            return
        try:
            store_of(current, path).find_unsent()
        except Exception as error:
            raise RuntimeError(
                f"{current.rank.prefix}a preemption could not save to {path}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def save(self, path: str, **options: Any) -> Any:
        """Calls `save_checkpoint`."""
        return save_checkpoint(path, **options)

    def end_uploads(self, current: runtime.Runtime, limit_s: float) -> None:
        """Waits for transfers to stores, and ends them after the limit, in seconds.

        Raises:
            RuntimeError: a save in the background has failed.
        """
        stores = stores_in_use(current)
        handle = running(current)
        if stores and handle is not None:
            handle.wait()  # otherwise nothing would be saved
        deadline = time.monotonic() + limit_s
        for store in stores:
            reason = f"after {limit_s:g} s (SMP_UPLOAD_WAIT_S)"
            try:
                is_over = store.wait(max(0.0, deadline - time.monotonic()))
            except RuntimeError as error:
                is_over, reason = False, f"({error})"
            if not is_over:
                _log.warning(
                    "%sleaving before %s is complete in %s, %s. It is complete in %s: the next job "
                    "that has this folder goes on from it and sends what is missing; others go on "
                    "from an older one",
                    current.rank.prefix,
                    ", ".join(sorted({key.name for key in store.waiting()})) or "a checkpoint",
                    store,
                    reason,
                    store.root,
                )
            store.stop()
