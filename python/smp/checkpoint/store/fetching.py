"""Fetches files of a generation into a folder of this machine on demand.

Imports no torch. Any number of processes may do so at the same time: one of them fetches each file,
if that does not take too long, and generations in use are not deleted.
"""

from __future__ import annotations

import os
import secrets
import weakref
from pathlib import Path

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


class Fetched:
    """A generation of a store as a folder that fetches files on demand.

    The folder stays as long as this object lives.

    Args:
        store: store that has the generation.
        key: key of the generation, which is complete.
        root: folder of the checkpoints of this address on this machine.
        patience_s: seconds after which this process fetches a file that another one is fetching. A
            rank that waits longer would count as stuck, and the other process may be stopped.

    Attributes:
        key: key of the generation.
        folder: folder with the manifest and the files fetched so far.
        manifest: manifest of the generation.
        fetched: names of files that this object has fetched.

    Raises:
        FileNotFoundError: the store does not have the generation any more.
    """

    def __init__(self, store: ObjectStore, key: Key, root: Path, patience_s: float) -> None:
        self._store, self.key, self._patience_s = store, key, patience_s
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
            if not _has(path, record.num_bytes):
                self._fetch(name, path)
        finally:
            if lock is not None:
                lock.release(delete=False)
        return path

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
        try:
            return self._store.read(self.key, name)
        except FileNotFoundError as error:
            raise self._gone(name) from error

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
            try:
                self._store.get(self.key, name, temporary)
            except FileNotFoundError as error:
                raise self._gone(name) from error
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
