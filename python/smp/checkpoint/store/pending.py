"""Keeps links to complete checkpoints that wait in a folder to be sent. Imports no torch.

Beside the checkpoints of a folder lies ``.sending/<name>.<generation>/`` with hard links to the
files of each generation that is not in the store yet. So a checkpoint may be pruned or replaced
while it is sent, and the next job finds the generations that a killed job has left.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from smp.checkpoint import file_system
from smp.checkpoint import manifest as manifests
from smp.checkpoint.locks import OwnerLock, take_from_the_dead
from smp.checkpoint.manifest import FILE_NAME
from smp.checkpoint.store.names import Key

FOLDER = ".sending"
_LINKING = ".linking-"
_FAILED = re.compile(r"failed_(\d+)\.txt\Z")


@dataclass(frozen=True)
class Pending:
    """A generation that is to be sent. All ranks see it; the first one owns it.

    Attributes:
        key: key of the generation.
        folder: folder with links to its files and its manifest, and with messages of ranks.
    """

    key: Key
    folder: Path

    @classmethod
    def of(cls, root: Path, key: Key) -> Pending:
        """Returns the pending generation of a key, whether its folder exists or not.

        Args:
            root: folder of the checkpoints.
            key: key of the generation.
        """
        return cls(key, root / FOLDER / key.folder())

    def wait_until_seen(self) -> None:
        """Waits until this host sees the folder that the first rank has made.

        Raises:
            FileNotFoundError: this host does not see it within seconds.
        """
        file_system.wait_until_seen(
            self.folder, f"{self.folder}, which the first rank has created, is not visible here"
        )

    def sizes_here(self) -> dict[str, int]:
        """Returns the same as `sizes`, without files that are in folders of other hosts.

        Raises:
            FileNotFoundError: the generation is not pending any more.
        """
        sizes, there = self.sizes(), set(os.listdir(self.folder))
        return {name: num_bytes for name, num_bytes in sizes.items() if name in there}

    def sizes(self) -> dict[str, int]:
        """Returns the files' sizes in bytes by name, from the manifest, which is left out.

        Raises:
            FileNotFoundError: the generation is not pending any more.
        """
        manifest = manifests.read(self.folder)
        return {name: record.num_bytes for name, record in manifest.files.items()}

    def is_there(self) -> bool:
        """Returns whether the generation still waits; it does not once it is in the store."""
        return self.folder.is_dir()

    def say_sending(self, rank: int) -> None:
        """Records that a rank's transfer goes on; for :meth:`last_sign_s`."""
        try:
            (self.folder / f"sending_{rank}").touch()
        except FileNotFoundError:
            pass  # the generation is not pending any more

    def last_sign_s(self) -> float:
        """Returns the last time of a rank's sign, by some host's clock; only changes count."""
        try:
            return max(file.stat().st_mtime for file in self.folder.glob("sending_*"))
        except (FileNotFoundError, ValueError):
            return 0.0

    def say_failed(self, rank: int, reason: str) -> None:
        """Records that a rank cannot send its share; the first rank gives up then."""
        try:
            file_system.write_file(
                self.folder / f"failed_{rank}.txt", reason.encode(), f"{rank}-{os.getpid()}"
            )
        except FileNotFoundError:
            pass  # it is in the store, or was given up and deleted

    def failures(self) -> dict[int, str]:
        """Returns reasons by rank that called :meth:`say_failed`."""
        result = {}
        try:
            for name in os.listdir(self.folder):
                if match := _FAILED.match(name):
                    text = (self.folder / name).read_bytes()
                    result[int(match[1])] = text.decode(errors="replace")
        except FileNotFoundError:
            return {}
        return dict(sorted(result.items()))

    def forget_failures(self) -> None:
        """Deletes recorded failures before another attempt. First rank."""
        for rank in self.failures():
            (self.folder / f"failed_{rank}.txt").unlink(missing_ok=True)

    def delete(self) -> None:
        """Deletes a generation that is in the store, or not wanted any more. First rank."""
        # In one step, so that no process sees half of it.
        gone = self.folder.with_name(f"{_LINKING}{self.key.folder()}")
        try:
            self.folder.rename(gone)
        except FileNotFoundError:
            pass
        file_system.delete(gone)


def keys(root: Path) -> list[Key]:
    """Returns the keys of the generations that wait in a folder."""
    parent = root / FOLDER
    found = [Key.of_folder(path.name) for path in parent.glob("[!.]*") if path.is_dir()]
    return sorted(key for key in found if key is not None)


def lock_path(root: Path, key: Key) -> Path:
    """Returns the path of the lock of the sending process, the first rank's."""
    return root / FOLDER / f"{key.folder()}.lock"


def hold(root: Path, source: Path, key: Key) -> tuple[Pending, OwnerLock]:
    """Makes a complete checkpoint pending. First rank, before the checkpoint gets its name.

    Args:
        root: folder of the checkpoints.
        source: folder with the files and the manifest, all of them synchronised.
        key: key of the checkpoint.

    Raises:
        RuntimeError: the file system has no hard links.
        ValueError: another process sends this generation.
    """
    pending = Pending.of(root, key)
    parent = pending.folder.parent
    parent.mkdir(parents=True, exist_ok=True)
    lock = OwnerLock.take(lock_path(root, key))
    if lock is None:
        raise ValueError(f"generation {key.generation} of {root} is sent by another process")
    lock.sign()
    linking = parent / f"{_LINKING}{key.folder()}"
    try:
        file_system.delete(linking)
        linking.mkdir()
        for name in (*manifests.read(source).files, FILE_NAME):
            if (source / name).exists():  # otherwise it is in the folder of another host
                _link(source / name, linking / name)
        file_system.sync_folder(linking)
        linking.rename(pending.folder)
        file_system.sync_folder(parent)
    except BaseException:
        file_system.delete(linking)
        lock.release(delete=True)
        raise
    return pending, lock


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        raise RuntimeError(
            f"{source} cannot get a second name ({error.strerror}): checkpoints that go to a store "
            "are written to a folder whose file system has hard links; set SMP_STORE_FOLDER to one"
        ) from error


def left_by_the_dead(root: Path) -> list[tuple[Pending, OwnerLock]]:
    """Returns unsent generations of ended jobs, oldest first, with their locks. First rank."""
    parent = root / FOLDER
    names = sorted(os.listdir(parent)) if parent.is_dir() else []
    result = []
    for name in names:
        if name.startswith(_LINKING):
            key = Key.of_folder(name.removeprefix(_LINKING))
            if key is not None and f"{key.folder()}.lock" not in names:
                file_system.delete(parent / name)
            continue
        key = Key.of_folder(name.removesuffix(".lock"))
        if key is None or (name.endswith(".lock") and key.folder() in names):
            continue  # another name covers it, or it is no generation
        pending = Pending.of(root, key)
        linking = parent / f"{_LINKING}{key.folder()}"
        lock = take_from_the_dead(lock_path(root, key), [pending.folder, linking])
        if lock is None:
            continue
        file_system.delete(linking)
        if not pending.is_there():
            lock.release(delete=True)
            continue
        lock.sign()
        result.append((pending, lock))
    return sorted(result, key=lambda one: one[0].key)
