"""Generations: a checkpoint folder gets its name in one step or not at all. Imports no torch.

Names that lie beside it meanwhile are those of ``left_over``; the first rank owns the lock.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from smp.checkpoint import file_system, left_over
from smp.checkpoint import manifest as manifests
from smp.checkpoint.locks import OwnerLock
from smp.checkpoint.manifest import FILE_NAME, Manifest, ManifestError
from smp.config import given_files

NEWEST = "newest"
PARTIAL_SUFFIX = "_partial"

_MOST_NAME_BYTES = 4096
_PART = re.compile(r"(part|failed|left)_(\d+)\.json\Z")


class Generation:
    """A write of the folder ``<path>/<name>``.

    The first rank begins it, and the others join then. Each writes its own files into ``folder``
    and then calls :meth:`part_done`; when :meth:`parts` finds all ranks the first rank commits.
    Nothing here is collective.

    Attributes:
        folder: temporary folder, to write into.
        target: final path of the folder.
        generation: letters, digits, ``_`` and ``-``; unique among all jobs that save to ``path``.
    """

    def __init__(self, path: Path, name: str, generation: str, lock: OwnerLock | None) -> None:
        self.folder = left_over.temporary(path, name, generation)
        self.target = path / name
        self.generation = generation
        self._lock = lock

    @classmethod
    def begin(cls, path: Path, name: str, generation: str) -> Generation:
        """Makes the temporary folder, after deleting or finishing dead generations. First rank.

        Raises:
            ValueError: the name is invalid for a folder, or the generation is in use.
        """
        check_name(name)
        path.mkdir(parents=True, exist_ok=True)
        lock = left_over.own(path, generation)
        result = cls(path, name, generation, lock)
        try:
            result.folder.mkdir()
        except BaseException:
            lock.release(delete=True)
            raise
        return result

    @classmethod
    def join(cls, path: Path, name: str, generation: str) -> Generation:
        """Returns the generation that the first rank has begun. Every other rank.

        Raises:
            FileNotFoundError: this host does not see the folder within seconds.
        """
        result = cls(path, name, generation, None)
        file_system.wait_until_seen(
            result.folder,
            f"host {socket.gethostname()} does not see {result.folder}, which the first rank "
            f"created: {path} must be a folder that all hosts share",
        )
        return result

    def part_done(self, rank: int, part: dict[str, Any]) -> None:
        """Records that all files of ``rank`` are written and synchronised.

        Args:
            rank: number of the rank.
            part: JSON for the first rank's manifest, ``Piece.to_json()``.
        """
        self._say(f"part_{rank}.json", part)

    def part_failed(self, rank: int, reason: str) -> None:
        """Records that ``rank`` cannot write its files; read by :meth:`failures`."""
        self._say(f"failed_{rank}.json", {"reason": reason})

    def leave(self, rank: int) -> None:
        """Records that ``rank`` knows of a failure and writes no more."""
        with contextlib.suppress(OSError):  # the folder is gone, or the disk is full
            self._say(f"left_{rank}.json", {})

    def left(self) -> set[int]:
        """Returns the ranks that write no more because they or others have failed."""
        found = map(_PART.match, os.listdir(self.folder))
        return {int(match[2]) for match in found if match and match[1] != "part"}

    def parts(self, ranks: Iterable[int]) -> list[dict[str, Any]] | None:
        """Returns what these ranks gave to :meth:`part_done`; None if some have not."""
        paths = [self.folder / f"part_{rank}.json" for rank in ranks]
        names = {p.name for p in self.folder.iterdir()}
        if not all(p.name in names for p in paths):
            return None
        return [manifests.unseal(p.read_bytes(), str(p))["part"] for p in paths]

    def failures(self) -> dict[int, str]:
        """Returns reasons by rank that called :meth:`part_failed`; empty once the write is over.

        The first rank may end the write at any moment: it renames the folder, or deletes it.
        """
        result = {}
        try:
            for name in os.listdir(self.folder):
                match = _PART.match(name)
                if match and match[1] == "failed":
                    path = self.folder / name
                    content = manifests.unseal(path.read_bytes(), str(path))
                    result[int(match[2])] = str(content["part"]["reason"])
        except FileNotFoundError:
            return {}
        return dict(sorted(result.items()))

    def commit(
        self,
        manifest: Manifest | None,
        keep: int | None = None,
        name_newest: bool = True,
        when_complete: Callable[[Path], None] | None = None,
        elsewhere: Collection[str] = (),
    ) -> None:
        """Gives the folder its name, and makes it the newest. First rank.

        Args:
            manifest: manifest, written last; None for a folder without one, such as one of Hugging
                Face.
            keep: most partial checkpoints that stay, this one included; the oldest others are
                deleted. None: all stay.
            name_newest: whether to write its name into ``newest``.
            when_complete: called with the folder when all files in it are synchronised, before it
                gets its name.
            elsewhere: files of the manifest that are in folders of other hosts.

        Raises:
            ManifestError: a file of the manifest is missing or has another size.
        """
        if self._lock is None:
            raise ValueError("only the rank that began a generation can commit it")
        path = self.target.parent
        for file in list(self.folder.iterdir()):
            if _PART.match(file.name):
                file.unlink()
        if manifest is not None:
            _check_files(self.folder, manifest, elsewhere)
            file_system.write_file(
                self.folder / FILE_NAME, manifest.to_text(), unique=self.generation
            )
        file_system.sync_folder(self.folder)
        if when_complete is not None:
            when_complete(self.folder)
        replaced = self._rename()
        file_system.sync_folder(path)
        if name_newest:
            write_newest(path, self.target.name, self.generation)
        if replaced is not None:
            file_system.delete(replaced)
        if keep is not None:
            self._retain(keep)
        self._lock.release(delete=True)
        self._lock = None

    def abandon(self) -> None:
        """Deletes the written files, unless they were committed. No effect on ranks that joined."""
        if self._lock is not None:
            file_system.delete(self.folder)
            self._lock.release(delete=True)
            self._lock = None

    def committed(self) -> bool | None:
        """Returns whether the first rank has committed; None before it has decided."""
        for is_last_look in (not self.folder.is_dir(), True):
            try:
                if manifests.generation_of(self.target) == self.generation:
                    return True
            except FileNotFoundError:
                pass
            if is_last_look:
                break
        return None if self.folder.is_dir() else False

    def is_over(self) -> bool:
        """Returns whether the write has ended, well or not; `newest` is written by then."""
        return not left_over.lock_path(self.target.parent, self.generation).exists()

    def _say(self, name: str, part: dict[str, Any]) -> None:
        text = manifests.seal(f'{{"part":{manifests.dumps(part, name)}')
        file_system.write_file(self.folder / name, text, unique=self.generation)

    def _rename(self) -> Path | None:
        """Returns the folder that has the place of the target until it is deleted."""
        if not self.target.exists():
            self.folder.rename(self.target)
            return None
        if file_system.exchange(self.folder, self.target):
            return self.folder
        path, name = self.target.parent, self.target.name
        aside = left_over.temporary(path, name, self.generation, "old")
        self.target.rename(aside)
        try:
            self.folder.rename(self.target)
        except BaseException:
            aside.rename(self.target)
            raise
        return aside

    def _retain(self, keep: int) -> None:
        others = [p for p in partial_checkpoints(self.target.parent) if p != self.target]
        for folder in others[: max(0, len(others) - max(0, keep - 1))]:
            # Not deleted in place: half a checkpoint would still have its manifest.
            aside = left_over.temporary(folder.parent, folder.name, self.generation, "deleted")
            folder.rename(aside)
            file_system.delete(aside)


def new_generation() -> str:
    """Returns a generation unlike any other: 24 hexadecimal digits that begin with the time."""
    return f"{time.time_ns():016x}{secrets.token_hex(4)}"


def partial_checkpoints(path: Path) -> list[Path]:
    """Returns complete folders ``<tag>_partial`` in ``path``, oldest manifest first."""
    found = []
    for folder in path.glob(f"*{PARTIAL_SUFFIX}"):
        try:
            time_ns = (folder / FILE_NAME).stat().st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not folder.name.startswith("."):
            found.append((time_ns, folder.name, folder))
    return [folder for _, _, folder in sorted(found)]


def find(path: Path, tag: str | None) -> Path:
    """Returns the folder of the partial checkpoint ``tag`` in ``path``, or of the newest.

    Args:
        path: folder of checkpoints.
        tag: tag, with or without ``_partial``; None reads ``newest``. If that names a whole model,
            which was saved later, the newest partial checkpoint is taken.

    Raises:
        FileNotFoundError: there is no such checkpoint; the text names the existing ones.
    """
    name = newest(path) if tag is None else tag
    check_name(name)
    for candidate in (name + PARTIAL_SUFFIX, name):
        aside = sorted(path.glob(f".{glob.escape(candidate)}.old-*"))
        for folder in (path / candidate, *aside):
            if (folder / FILE_NAME).is_file():
                return folder
    partial = partial_checkpoints(path)
    if tag is None and partial and (path / name).is_file():
        return partial[-1]
    raise _not_found(path, tag, name)


def newest_whole(path: Path) -> Path | None:
    """Returns the whole model that the file ``newest`` names; None if it names something else."""
    if not (path / NEWEST).is_file():
        return None
    file = path / newest(path)
    return file if file.is_file() else None


def newest(path: Path) -> str:
    """Returns the name that the file ``newest`` holds.

    Raises:
        FileNotFoundError: no checkpoint was saved in ``path``.
    """
    try:
        text = given_files.read_bytes(path / NEWEST, _MOST_NAME_BYTES).decode(errors="replace")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} has no file '{NEWEST}': no checkpoint has been saved there"
        ) from None
    except OSError as error:
        raise ManifestError(f"{path / NEWEST} cannot be read: {error.strerror}") from None
    try:
        check_name(text.strip())
    except ValueError as error:
        raise ManifestError(f"{path / NEWEST}: {error}") from None
    return text.strip()


def _not_found(path: Path, tag: str | None, name: str) -> FileNotFoundError:
    there = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
    there = [n for n in there if not n.startswith(".") and n != NEWEST]
    asked = f"'{NEWEST}' in {path} names '{name}', but" if tag is None else f"{path}:"
    is_whole = (path / name).is_file()
    return FileNotFoundError(
        f"{asked} there is no complete partial checkpoint '{name}'; there are: "
        f"{', '.join(there) or 'none'}"
        + (f". '{name}' is a whole model: load it with partial=False" if is_whole else "")
    )


def _check_files(folder: Path, manifest: Manifest, elsewhere: Collection[str]) -> None:
    for name, record in manifest.files.items():
        if name in elsewhere:
            continue
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != record.num_bytes:
            came = "is missing" if size is None else f"has {size}"
            raise ManifestError(f"{path} {came}, but {record.num_bytes} bytes were written")


def check_name(name: str) -> None:
    """Refuses names that a checkpoint cannot have in its folder.

    Raises:
        ValueError: the name is invalid; the text describes valid names.
    """
    if not re.match(r"[^./\\\0\n][^/\\\0\n]*\Z", name) or name == NEWEST:
        raise ValueError(
            f"{name!r} cannot be the tag of a checkpoint: give a plain name without '/' and "
            f"leading '.', and not '{NEWEST}'"
        )


def write_newest(path: Path, name: str, generation: str) -> None:
    """Makes ``newest`` hold a name, in one step."""
    file_system.write_file(path / NEWEST, name.encode(), unique=generation)
