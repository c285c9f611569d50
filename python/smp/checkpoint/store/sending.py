"""Sends a pending generation: files by all ranks, the manifest last. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field

from smp.checkpoint.manifest import FILE_NAME
from smp.checkpoint.store import plan
from smp.checkpoint.store.names import Key
from smp.checkpoint.store.objects import ObjectStore, Stopped
from smp.checkpoint.store.pending import Pending

#: An incomplete generation counts as dead when no object of it has changed for so long.
QUIET_S = 3600.0
_SAY_S = 5.0
_PAUSES_S = (1.0, 4.0, 15.0, 60.0, 120.0)
#: Errors after which a later attempt cannot succeed.
_FINAL = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)


class NotSent(RuntimeError):
    """Raised if a generation is not complete in the store; the text has the reason."""


@dataclass
class Progress:
    """The progress of one rank with its share of a generation.

    Attributes:
        total_bytes: bytes of this rank's share, without files that the store had already.
        sent_bytes: bytes sent so far; repeated attempts count again.
        sent: files that this process has sent.
        skipped: files of the share that the store had already.
    """

    total_bytes: int = 0
    sent_bytes: int = 0
    sent: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def send_share(
    store: ObjectStore,
    pending: Pending,
    rank: int,
    num_ranks: int,
    progress: Progress,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Sends one rank's share; files that are in the store already are skipped.

    Args:
        store: store to send to.
        pending: generation to send.
        rank: number of this process among the ranks that share the folder.
        num_ranks: number of these ranks.
        progress: progress, which this call updates.
        pause: waits for so many seconds before another attempt; may raise `Stopped`.

    Raises:
        NotSent: a file could not be sent; the text names it.
        Stopped: the transfer is not needed any more.
        FileNotFoundError: the generation is not pending any more.
    """
    sizes = pending.sizes_here()
    mine = plan.shares(sizes, num_ranks)[rank]
    pending.say_sending(rank)
    there = store.stored(pending.key).sizes
    missing = plan.missing({name: sizes[name] for name in mine}, there)
    progress.skipped = [name for name in mine if name not in missing]
    progress.total_bytes = sum(sizes[name] for name in missing)
    said_s = time.monotonic()

    def told(num_bytes: int) -> None:
        nonlocal said_s
        progress.sent_bytes += num_bytes
        if time.monotonic() - said_s > _SAY_S:
            said_s = time.monotonic()
            pending.say_sending(rank)

    for name in missing:
        _send(store, pending, name, told, pause)
        progress.sent.append(name)
    there = store.stored(pending.key).sizes if missing else there
    if lost := plan.missing({name: sizes[name] for name in mine}, there):
        raise NotSent(
            f"{store.address}: {lost[0]} was sent with {sizes[lost[0]]} bytes, and the store has "
            f"{there.get(lost[0], 'nothing')}"
        )


def _send(
    store: ObjectStore,
    pending: Pending,
    name: str,
    told: Callable[[int], None],
    pause: Callable[[float], None],
) -> None:
    for pause_s in (*_PAUSES_S, None):
        try:
            store.put(pending.key, name, pending.folder / name, told)
            return
        except Stopped:
            raise
        except Exception as error:
            if not pending.is_there():
                raise FileNotFoundError(f"{pending.folder} is gone") from error
            if pause_s is None or isinstance(error, _FINAL):
                raise NotSent(
                    f"{store.address}: {name} could not be sent: {type(error).__name__}: {error}"
                ) from error
            pause(pause_s)


def complete(
    store: ObjectStore,
    pending: Pending,
    wait: Callable[[], None],
    timeout_s: float,
    elsewhere: Callable[[], Mapping[int, str]] = dict,
) -> None:
    """Writes the manifest when the files of all ranks are in the store. First rank.

    Args:
        store: store to send to.
        pending: generation to complete.
        wait: called while files are missing; raises to give up.
        timeout_s: seconds after which to give up if no file arrives and no rank sends bytes.
        elsewhere: returns failures of ranks of other hosts.

    Raises:
        NotSent: a rank has failed, or no file arrived any more.
    """
    sizes = pending.sizes()
    seen: tuple[list[str], float] | None = None
    deadline = time.monotonic() + timeout_s
    while missing := plan.missing(sizes, (found := store.stored(pending.key)).sizes):
        _raise_for(pending, elsewhere)
        now = missing, pending.last_sign_s()
        if now != seen:
            seen, deadline = now, time.monotonic() + timeout_s
        if time.monotonic() > deadline:
            raise NotSent(
                f"{store.address}: {len(missing)} files of {pending.key.folder()} have not arrived "
                f"within {timeout_s:g} s, {missing[0]} among them"
            )
        wait()
    for name in plan.surplus(found.sizes, sizes):
        store.delete(pending.key, name)
    store.end_uploads(pending.key)
    if not found.is_complete:
        store.put(pending.key, FILE_NAME, pending.folder / FILE_NAME)


def _raise_for(pending: Pending, elsewhere: Callable[[], Mapping[int, str]]) -> None:
    for rank, reason in (pending.failures() or elsewhere()).items():
        raise NotSent(f"global_rank {rank}: {reason}")


def wait_until_complete(
    store: ObjectStore,
    pending: Pending,
    wait: Callable[[], None],
    timeout_s: float,
    elsewhere: Callable[[], Mapping[int, str]] = dict,
) -> None:
    """Waits until another host's first rank has written the manifest. First rank of a folder.

    Args:
        store: store that gets the generation.
        pending: the part of the generation that is in the folder of this host.
        wait: called while the manifest is missing; raises to give up.
        timeout_s: seconds after which to give up if nothing arrives.
        elsewhere: returns failures of ranks of other hosts.

    Raises:
        NotSent: a rank has failed, or nothing arrived any more.
    """
    seen: dict[str, int] | None = None
    deadline = time.monotonic() + timeout_s
    while not (found := store.stored(pending.key)).is_complete:
        _raise_for(pending, elsewhere)
        if found.sizes != seen:
            seen, deadline = dict(found.sizes), time.monotonic() + timeout_s
        if time.monotonic() > deadline:
            raise NotSent(
                f"{store.address}: the files of other hosts of {pending.key.folder()} have not "
                f"arrived within {timeout_s:g} s"
            )
        wait()


def prune(
    store: ObjectStore, done: Key, keep: int | None, held: Set[Key], quiet_s: float = QUIET_S
) -> list[Key]:
    """Deletes old generations, and incomplete ones that count as dead. First rank.

    Returns:
        keys of the deleted generations.
    """
    found = {key: store.stored(key) for key in store.generations()}
    keys = plan.doomed(found.values(), done, keep, held, time.time(), quiet_s)
    for key in keys:
        delete(store, key, found[key].sizes)
    return keys


def delete(store: ObjectStore, key: Key, names: Iterable[str]) -> None:
    """Deletes a generation, beginning with its manifest, so that it is incomplete at once."""
    names = list(names)
    if FILE_NAME in names:
        store.delete(key, FILE_NAME)  # half a checkpoint would still have its manifest
    store.delete_folder(key, [name for name in names if name != FILE_NAME])
