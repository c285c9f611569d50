"""Fetches files of a generation into a folder of this machine on demand.

Imports no torch. Any number of processes may do so at the same time: one of them fetches each file,
if that does not take too long, and generations in use are not deleted.
"""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from smp.checkpoint import file_system
from smp.checkpoint import manifest as manifests
from smp.checkpoint.locks import OwnerLock
from smp.checkpoint.manifest import FILE_NAME, Manifest, ManifestError
from smp.checkpoint.store.names import Key
from smp.checkpoint.store.objects import ObjectStore

FOLDER = ".fetched"
_LOCK = ".lock"
_WORK = ".work"
_DELETE_S = 300.0
_POLL_S = 0.5
_T = TypeVar("_T")


class Fetched:
    """A generation of a store as a folder that fetches files on demand.

    The folder stays as long as this object lives.

    Args:
        store: store that has the generation.
        key: key of the generation, which is complete.
        root: folder of the checkpoints of this address on this machine.
        patience_s: seconds after which this process fetches a file that another one is fetching. A
            rank that waits longer would count as stuck, and the other process may be stopped.
        beside: folder on this machine with some files of the generation and its manifest, or None.
        is_complete: whether the store has all files; otherwise other hosts are sending the rest,
            and a file is waited for, for ``patience_s``.

    Attributes:
        key: key of the generation.
        folder: folder with the manifest and the files fetched so far.
        manifest: manifest of the generation.
        fetched: names of files that this object has fetched.

    Raises:
        FileNotFoundError: the store does not have the generation any more.
    """

    def __init__(
        self,
        store: ObjectStore,
        key: Key,
        root: Path,
        patience_s: float,
        *,
        beside: Path | None = None,
        is_complete: bool = True,
    ) -> None:
        self._store, self.key, self._patience_s = store, key, patience_s
        self._beside, self._is_complete = beside, is_complete
        self.folder = root / FOLDER / key.folder()
        self.fetched: list[str] = []
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        # While a process shares the lock the folder is not deleted.
        use = OwnerLock.take(_use_path(self.folder), _DELETE_S, is_shared=True)
        if use is None:
            raise TimeoutError(f"{self.folder} is not deleted after {_DELETE_S:g} s")
        self._end_use = weakref.finalize(self, use.release, delete=False)
        try:
            self.folder.mkdir(exist_ok=True)
            _work(self.folder).mkdir(exist_ok=True)
            self.manifest = self._read_manifest()
        except BaseException:
            self.close()
            raise

    def get(self, name: str) -> Path:
        """Returns the path of a file of the manifest, complete and checked when it was fetched.

        Raises:
            FileNotFoundError: the store does not have the file any more.
            ManifestError: the object is damaged.
        """
        record = self.manifest.files[name]
        path = self.folder / name
        if _has(path, record.num_bytes):
            return path
        # Another process that has it for too long may be stuck.
        lock = OwnerLock.take(_work(self.folder) / f"{name}{_LOCK}", self._patience_s)
        try:
            if not (_has(path, record.num_bytes) or self._take_beside(name, path)):
                self._fetch(name, path)
        finally:
            if lock is not None:
                lock.release(delete=False)
        return path

    def _take_beside(self, name: str, path: Path) -> bool:
        """Gives a file of this machine a second name in the folder; returns whether there is one.

        The folder beside may be deleted at any time, and this one stays.
        """
        if self._beside is None or not _has(
            self._beside / name, self.manifest.files[name].num_bytes
        ):
            return False
        path.unlink(missing_ok=True)
        try:
            os.link(self._beside / name, path)
        except FileNotFoundError:
            return False  # it was deleted meanwhile
        return True

    def get_all(self) -> None:
        """Fetches all files."""
        for name in self.manifest.files:
            self.get(name)

    def close(self) -> None:
        """Permits deletion of the folder from now on."""
        self._end_use()

    def _read_manifest(self) -> Manifest:
        path = self.folder / FILE_NAME
        if not path.exists():
            text = self._read(FILE_NAME)
            Manifest.from_text(text, self._where(FILE_NAME))  # raises if the text is damaged
            file_system.write_file(path, text, secrets.token_hex(4))
        return manifests.read(self.folder)

    def _read(self, name: str) -> bytes:
        if self._beside is not None:
            return (self._beside / name).read_bytes()
        return self._waiting_for(name, lambda: self._store.read(self.key, name))

    def _waiting_for(self, name: str, read: Callable[[], _T]) -> _T:
        """Reads an object; waits for it while other hosts send the generation."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return read()
            except FileNotFoundError as error:
                if self._is_complete:
                    raise self._gone(name) from error
                if time.monotonic() > deadline:
                    raise FileNotFoundError(
                        f"{self._where(name)} has not arrived within {self._patience_s:g} s: it is "
                        "in the folder of another host, which sends it; resume again later"
                    ) from error
            time.sleep(_POLL_S)

    def _where(self, name: str) -> str:
        return f"{self._store.address}/{self.key.folder()}/{name}"

    def _gone(self, name: str) -> FileNotFoundError:
        return FileNotFoundError(
            f"{self._where(name)} does not exist any more: the checkpoint was deleted, perhaps by "
            "a job that keeps fewer; resume again, from a newer one"
        )

    def _fetch(self, name: str, path: Path) -> None:
        record = self.manifest.files[name]
        temporary = _work(self.folder) / f"{name}.{secrets.token_hex(4)}.fetching"
        try:
            self._waiting_for(name, lambda: self._store.get(self.key, name, temporary))
            if manifests.record_of(temporary, record.chunk_bytes) != record:
                raise ManifestError(
                    f"{self._where(name)} is damaged: its bytes are not those that were written; "
                    "resume from another checkpoint"
                )
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        file_system.sync_folder(path.parent)
        self.fetched.append(name)


def tidy(root: Path, keep: Key | None) -> list[str]:
    """Deletes fetched generations that no process uses.

    Args:
        root: folder of the checkpoints of an address.
        keep: key of a generation that stays, or None.

    Returns:
        names of the deleted generations.
    """
    parent, deleted = root / FOLDER, []
    for name in sorted(os.listdir(parent)) if parent.is_dir() else ():
        folder = parent / name
        if not folder.is_dir() or name.endswith(_WORK) or (keep and name == keep.folder()):
            continue
        lock = OwnerLock.take(_use_path(folder))
        if lock is None:
            continue
        try:
            if lock.is_real:
                file_system.delete(folder)
                file_system.delete(_work(folder))
                deleted.append(name)
        finally:
            lock.release(delete=lock.is_real)
    return deleted


def _work(folder: Path) -> Path:
    """Returns the folder beside it for locks of its files, and for incomplete files."""
    return folder.with_name(f"{folder.name}{_WORK}")


def _use_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{_LOCK}")


def _has(path: Path, num_bytes: int) -> bool:
    try:
        return path.stat().st_size == num_bytes
    except FileNotFoundError:
        return False
