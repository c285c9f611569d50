"""Reads and writes objects of a store by name, on fsspec. Imports no torch."""

from __future__ import annotations

import datetime
import importlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smp.checkpoint.store.names import SENDING_SUFFIX, Address, Key
from smp.checkpoint.store.plan import Stored

#: Bytes of one part of a large object; S3 takes at most 10,000 parts.
_PART_BYTES = 16 << 20
_MAX_PARTS = 9_000
_PARTS_AT_ONCE = 4
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
_TIMES = ("LastModified", "mtime", "updated", "created")


class Stopped(Exception):
    """Raised by a transfer whose result is not needed any more."""


class ObjectStore:
    """The generations below one address. Any thread may use it.

    Args:
        address: address of the checkpoints.
        is_stopped: called during transfers; True ends them with `Stopped`.

    Raises:
        ImportError: packages for this store are missing; the text names them.
    """

    def __init__(self, address: Address, is_stopped: Callable[[], bool] = lambda: False) -> None:
        self.address = address
        self._is_stopped = is_stopped
        self._fs = _open(address)
        self._root = self._fs._strip_protocol(str(address))

    # ---- reading

    def generations(self) -> list[Key]:
        """Returns all generations, complete or not, oldest first."""
        keys = [Key.of_folder(name) for name, entry in self._list("").items() if _is_folder(entry)]
        return sorted(key for key in keys if key is not None)

    def stored(self, key: Key) -> Stored:
        """Returns the objects of a generation; none if it does not exist."""
        entries = {n: e for n, e in self._list(key.folder()).items() if not _is_folder(e)}
        sizes = {name: int(entry["size"]) for name, entry in entries.items()}
        changed_s = max((_changed_s(entry) for entry in entries.values()), default=0.0)
        return Stored(key, sizes, changed_s)

    def read(self, key: Key, name: str) -> bytes:
        """Returns the bytes of a small object.

        Raises:
            FileNotFoundError: the object does not exist.
        """
        content: bytes = self._fs.cat_file(self._path(key, name))
        return content

    def get(self, key: Key, name: str, target: Path) -> None:
        """Writes an object into a file.

        Raises:
            FileNotFoundError: the object does not exist.
        """
        self._fs.get_file(self._path(key, name), str(target), callback=self._callback(None))

    # ---- writing

    def put(
        self, key: Key, name: str, source: Path, progress: Callable[[int], None] | None = None
    ) -> None:
        """Makes an object of a file: all of it, or none.

        Args:
            key: key of the generation.
            name: name of the object.
            source: the file.
            progress: called with the number of bytes of each piece that was sent.
        """
        path = self._path(key, name)
        if self.address.protocol == "memory":
            self._fs.pipe_file(path, source.read_bytes())
        elif self.address.protocol == "file":
            self._put_by_rename(path, source)
        else:
            num_bytes = source.stat().st_size
            part_bytes = max(_PART_BYTES, -(-num_bytes // _MAX_PARTS))
            # Unlike closing a file, put_file aborts the upload if it fails in the middle.
            options = {"max_concurrency": _PARTS_AT_ONCE} if self.address.protocol == "s3" else {}
            self._fs.put_file(
                str(source), path, callback=self._callback(progress), chunksize=part_bytes,
                **options,
            )  # fmt: skip
            return
        if progress is not None:
            progress(source.stat().st_size)

    def _put_by_rename(self, path: str, source: Path) -> None:
        """Writes a file under a temporary name, so that no reader sees it incomplete."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{path}.{secrets.token_hex(4)}{SENDING_SUFFIX}"
        try:
            with open(source, "rb") as read, open(temporary, "xb") as written:
                while chunk := read.read(_PART_BYTES):
                    if self._is_stopped():
                        raise Stopped
                    written.write(chunk)
                written.flush()
                os.fsync(written.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def delete(self, key: Key, name: str) -> None:
        """Deletes an object that may be gone."""
        try:
            self._fs.rm_file(self._path(key, name))
        except FileNotFoundError:
            pass

    def delete_folder(self, key: Key, names: list[str]) -> None:
        """Deletes a generation that has only the objects of these names."""
        for name in names:
            self.delete(key, name)
        self.end_uploads(key)
        if self.address.protocol in ("file", "memory"):
            try:
                self._fs.rmdir(self._root + "/" + key.folder())
            except (FileNotFoundError, OSError):
                pass  # another process has deleted it, or put an object into it

    def end_uploads(self, key: Key) -> int:
        """Aborts multipart uploads that dead senders of a generation left; no listing shows them.

        Returns:
            number of these uploads.
        """
        if self.address.protocol != "s3":
            return 0  # GCS ends them itself after a week; others have none
        bucket, _, prefix = self._path(key, "").partition("/")
        count, more = 0, True
        while more:
            found = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
            for upload in found.get("Uploads") or []:
                self._fs.call_s3(
                    "abort_multipart_upload",
                    Bucket=bucket,
                    Key=upload["Key"],
                    UploadId=upload["UploadId"],
                )
                count += 1
            more = bool(found.get("IsTruncated"))
        return count

    # ---- inside

    def _path(self, key: Key, name: str) -> str:
        return f"{self._root}/{key.folder()}/{name}"

    def _list(self, folder: str) -> dict[str, dict[str, Any]]:
        path = f"{self._root}/{folder}" if folder else self._root
        self._fs.invalidate_cache()  # other ranks write
        try:
            entries = self._fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        named = ((entry["name"].rstrip("/").rpartition("/")[2], entry) for entry in entries)
        own = path.rpartition("/")[2]
        return {name: entry for name, entry in named if name and (name != own or folder == "")}

    def _callback(self, progress: Callable[[int], None] | None) -> Any:
        from fsspec.callbacks import Callback

        store = self

        class Watch(Callback):  # type: ignore[misc]
            def relative_update(self, inc: int = 1) -> None:
                if store._is_stopped():
                    raise Stopped
                if progress is not None:
                    progress(inc)

        return Watch()


def _open(address: Address) -> Any:
    names = ["fsspec", *([_PACKAGES[address.protocol]] if address.protocol in _PACKAGES else [])]
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ImportError(
                f"{address}: the package {name} is needed for checkpoints in this store and cannot "
                f"be imported ({error}); in the folder of smp's sources, pip install '.[store]'"
            ) from error
    import fsspec

    # Other code of the process may have a cached one with other settings.
    return fsspec.filesystem(address.protocol, skip_instance_cache=True)


def _is_folder(entry: dict[str, Any]) -> bool:
    return bool(entry["type"] == "directory")


def _changed_s(entry: dict[str, Any]) -> float:
    for name in _TIMES:
        value = entry.get(name)
        if isinstance(value, str):
            value = datetime.datetime.fromisoformat(value.replace("Z", "+00:00"))
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0
