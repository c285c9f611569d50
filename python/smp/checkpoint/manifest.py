"""Reads and writes ``manifest.json``, format 1, which describes a checkpoint folder. No torch.

The text is JSON, one file or entry a line, and ends with the CRC-32 of all text before that key.
Reading is strict: values that are malformed, unknown or out of the bounds of a file are errors that
name the file and the key. Nothing in a manifest is ever run.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smp.checkpoint.json_reader import Malformed, Node
from smp.config import given_files
from smp.tensor_parallel.parts import Part

FORMAT = 1
FILE_NAME = "manifest.json"

#: Bytes of one element, by the name of the dtype.
ITEM_BYTES: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1
    ),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}

_MAX_NUMEL = 2**60
_TAIL = re.compile(rb',\n"crc32":"([0-9a-f]{8})"}\n\Z')
_PLAIN_NAME = re.compile(r"[^/\\\0]+\Z")


class ManifestError(ValueError):
    """A manifest that is damaged, of another version, or contradicts itself."""


@dataclass(frozen=True)
class FileRecord:
    """Size and checksums of one file: CRC-32 (that of zip) of each ``chunk_bytes`` bytes."""

    num_bytes: int
    chunk_bytes: int
    crc32: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "crc32": list(self.crc32)}


def record_of(path: Path, chunk_bytes: int = 4 << 20) -> FileRecord:
    """Returns the record of an existing file; reads it once."""
    num_bytes = 0
    crcs = []
    with given_files.open_regular(path) as file:
        while chunk := file.read(chunk_bytes):
            num_bytes += len(chunk)
            crcs.append(zlib.crc32(chunk))
    return FileRecord(num_bytes, chunk_bytes, tuple(crcs))


def check_file(path: Path, record: FileRecord) -> None:
    """Reads a file that is used as a whole, and compares it with its record.

    Raises:
        ManifestError: the file differs from its record; the text names it.
    """
    if record_of(path, record.chunk_bytes) != record:
        raise ManifestError(
            f"{path} is damaged: its bytes are not those that were written; resume from another "
            "checkpoint (`smp ckpt verify` reads all files)"
        )


@dataclass(frozen=True)
class Block:
    """A part in a file: contiguous from byte ``offset`` on."""

    file: str
    offset: int
    part: Part

    def to_json(self, shape: tuple[int, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {"file": self.file, "offset": self.offset}
        part = self.part
        if part != Part.whole(shape):
            result["cut"] = [part.dim, part.begin, part.end, part.extent]
            result["flat"] = [part.flat_begin, part.flat_numel]
            if part.view is not None:
                result["view"] = list(part.view)
        return result


@dataclass
class StoredEntry:
    """A tensor of the job and the places of its elements; ``dtype`` is torch's name of it."""

    dtype: str
    shape: tuple[int, ...]
    blocks: list[Block]

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        blocks = [block.to_json(self.shape) for block in self.blocks]
        return {"dtype": self.dtype, "shape": list(self.shape), "blocks": blocks}


@dataclass
class Piece:
    """The files and entries of one rank; the manifest is assembled from those of all ranks."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    entries: dict[str, StoredEntry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "files": {name: record.to_json() for name, record in self.files.items()},
            "entries": {name: entry.to_json() for name, entry in self.entries.items()},
            "values": self.values,
        }

    @classmethod
    def from_json(cls, value: Any, source: str) -> Piece:
        with _errors(source):
            return _piece(Node(value, ""), strict_files=False)


@dataclass
class Layout:
    """The configuration of the job that saved, and the size of each axis (pp, tp, rdp, ...)."""

    config: dict[str, Any]
    sizes: dict[str, int]


@dataclass
class Manifest:
    """The description of a checkpoint folder.

    Attributes:
        generation: the write that made the folder.
        versions: versions of smp, torch and Python, for users and error messages.
        layout: layout of the job that saved.
        files: all files but the manifest, by name in the folder.
        entries: tensors by global name, ``model/<name>``, ``master/<name>``,
            ``optimizer/<name>/<key>``.
        values: JSON values, not tensors, that another layout needs.
    """

    generation: str
    versions: dict[str, str]
    layout: Layout
    files: dict[str, FileRecord]
    entries: dict[str, StoredEntry]
    values: dict[str, Any]

    @classmethod
    def assemble(
        cls, generation: str, versions: Mapping[str, str], layout: Layout, pieces: Iterable[Piece]
    ) -> Manifest:
        """Assembles the manifest from the pieces of all ranks.

        If several pieces have values under one key, dictionaries are merged and others must be
        equal. The blocks of an entry are those of all pieces.

        Raises:
            ManifestError: pieces contradict each other; the text names the key.
        """
        manifest = cls(generation, dict(versions), layout, {}, {}, {})
        for piece in pieces:
            for name, record in piece.files.items():
                if name in manifest.files:
                    raise ManifestError(f"two ranks wrote the file {name}")
                manifest.files[name] = record
            for name, entry in piece.entries.items():
                _add_entry(manifest.entries, name, entry)
            _merge_values(manifest.values, piece.values, "values")
        return manifest

    def to_text(self) -> bytes:
        """Returns the content of ``manifest.json``."""
        lines = [
            f'"format":{FORMAT}',
            _line("generation", self.generation),
            _line("versions", self.versions),
            _line("layout", vars(self.layout)),
            _table("files", ((name, file.to_json()) for name, file in self.files.items())),
            _table("entries", ((name, entry.to_json()) for name, entry in self.entries.items())),
            _table("values", self.values.items()),
        ]
        return seal("{" + ",\n".join(lines))

    @classmethod
    def from_text(cls, text: bytes, source: str) -> Manifest:
        """Reads :meth:`to_text`.

        Raises:
            ManifestError: the text is invalid; the error names ``source`` and the key.
        """
        root = Node(unseal(text, source), "")
        with _errors(source):
            number = root["format"].integer()
            if number != FORMAT:
                raise ManifestError(
                    f"{source}: format {number}, this smp reads {FORMAT}; it was written by "
                    f"{_versions_text(root)}: use that release or a later one"
                )
            root.only("format", "generation", "versions", "layout", "files", "entries", "values")
            layout = root["layout"].only("config", "sizes")
            piece = _piece(root, strict_files=True)
            return cls(
                root["generation"].text(),
                {name: node.text() for name, node in root["versions"].items()},
                Layout(
                    layout["config"].mapping(),
                    {name: node.integer(1) for name, node in layout["sizes"].items()},
                ),
                piece.files,
                piece.entries,
                piece.values,
            )


def read(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint folder.

    Raises:
        FileNotFoundError: there is none: no complete checkpoint, or one of another library.
        ManifestError: the manifest is damaged or of another version.
    """
    path = folder / FILE_NAME
    try:
        text = given_files.read_bytes(path, most_bytes=None)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{folder} has no {FILE_NAME}: it is not a checkpoint of smp, or was never completed"
        ) from None
    except OSError as error:
        raise ManifestError(f"{path} cannot be read: {error.strerror}") from None
    return Manifest.from_text(text, str(path))


def seal(body: str) -> bytes:
    """Completes ``body``, a JSON object without its closing brace, by its CRC-32 and the brace."""
    text = body.encode()
    return text + b',\n"crc32":"%08x"}\n' % zlib.crc32(text)


def unseal(text: bytes, source: str) -> Any:
    """Returns the object that :func:`seal` wrote, without the checksum.

    Raises:
        ManifestError: the text is cut off, changed, or no JSON.
    """
    match = _TAIL.search(text[-32:])
    if match is None:
        raise ManifestError(
            f"{source}: ends without its checksum ({len(text)} bytes): it was cut off"
        )
    body = text[: len(text) - len(match[0])]
    if zlib.crc32(body) != int(match[1], 16):
        raise ManifestError(f"{source}: the checksum differs: the text was changed or damaged")
    try:
        return given_files.parse_json(body + b"}")
    except ValueError as error:
        raise ManifestError(f"{source}: not JSON: {error}") from None


@contextlib.contextmanager
def _errors(source: str) -> Iterator[None]:
    """Adds the name of the file to errors of malformed nodes."""
    try:
        yield
    except Malformed as error:
        raise ManifestError(f"{source}: {error}") from None


def _line(key: str, value: Any) -> str:
    return f"{json.dumps(key)}:{dumps(value, key)}"


def _table(key: str, rows: Iterable[tuple[str, Any]]) -> str:
    text = ",\n".join(f" {json.dumps(name)}:{dumps(row, f'{key}.{name}')}" for name, row in rows)
    return f"{json.dumps(key)}:{{\n{text}}}" if text else f"{json.dumps(key)}:{{}}"


def dumps(value: Any, key: str) -> str:
    """Returns compact JSON; an error names ``key``."""
    try:
        return json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ManifestError(f"manifest key {key} cannot be written as JSON: {error}") from None


def _versions_text(root: Node) -> str:
    try:
        return ", ".join(f"{name} {node.text()}" for name, node in root["versions"].items())
    except Malformed:
        return "an unknown release"


def _piece(root: Node, strict_files: bool) -> Piece:
    files = {_file_name(node): _file(node) for _, node in root["files"].items()}
    entries = {
        name: _entry(node, files if strict_files else None)
        for name, node in root["entries"].items()
    }
    return Piece(files, entries, root["values"].mapping())


def _file_name(node: Node) -> str:
    name = node.key
    if not _PLAIN_NAME.match(name) or name in (".", "..", FILE_NAME):
        raise node.malformed("a plain file name in this folder")
    return name


def _file(node: Node) -> FileRecord:
    node.only("num_bytes", "chunk_bytes", "crc32")
    num_bytes = node["num_bytes"].integer(0)
    chunk_bytes = node["chunk_bytes"].integer(1)
    crcs = node["crc32"].integers(0, 2**32 - 1)
    if len(crcs) != -(-num_bytes // chunk_bytes):
        raise node["crc32"].malformed(
            f"{-(-num_bytes // chunk_bytes)} checksums for {num_bytes} bytes"
        )
    return FileRecord(num_bytes, chunk_bytes, crcs)


def _entry(node: Node, files: Mapping[str, FileRecord] | None) -> StoredEntry:
    node.only("dtype", "shape", "blocks")
    dtype = node["dtype"].text()
    if dtype not in ITEM_BYTES:
        raise node["dtype"].malformed(f"a dtype ({', '.join(ITEM_BYTES)})")
    shape = node["shape"].integers(0, _MAX_NUMEL)
    if math.prod(max(size, 1) for size in shape) > _MAX_NUMEL:
        raise node["shape"].malformed("sizes of at most 2**60 elements")
    blocks = []
    num_stored: Counter[str] = Counter()
    for item in node["blocks"].elements():
        block = _block(item, shape)
        num_stored[block.file] += block.part.flat_numel
        if num_stored[block.file] > math.prod(shape):
            raise item.malformed(
                f"each element once in {block.file}; the blocks before have all {math.prod(shape)}"
            )
        num_bytes = block.part.flat_numel * ITEM_BYTES[dtype]
        if files is not None:
            if block.file not in files:
                raise item["file"].malformed("a file of this manifest")
            if block.offset + num_bytes > files[block.file].num_bytes:
                raise item["offset"].malformed(
                    f"{num_bytes} bytes inside of {block.file}, which has "
                    f"{files[block.file].num_bytes}"
                )
        blocks.append(block)
    return StoredEntry(dtype, shape, blocks)


def _block(node: Node, shape: tuple[int, ...]) -> Block:
    node.only("file", "offset", optional=("cut", "flat", "view"))
    part = Part.whole(shape)
    if "cut" in node:
        dim, begin, end, extent = node["cut"].integers(-1, _MAX_NUMEL, length=4)
        flat_begin, flat_numel = node["flat"].integers(0, _MAX_NUMEL, length=2)
        view = node["view"].integers(0, _MAX_NUMEL) if "view" in node else None
        part = Part(dim, begin, end, extent, flat_begin, flat_numel, view)
        try:
            part.check(shape)
        except ValueError as error:
            raise node.malformed(f"a part of a tensor of sizes {list(shape)} ({error})") from None
    return Block(node["file"].text(), node["offset"].integer(0), part)


def _add_entry(entries: dict[str, StoredEntry], name: str, entry: StoredEntry) -> None:
    known = entries.get(name)
    if known is None:
        entries[name] = StoredEntry(entry.dtype, entry.shape, list(entry.blocks))
        return
    if (known.dtype, known.shape) != (entry.dtype, entry.shape):
        raise ManifestError(
            f"ranks disagree about {name}: {known.dtype} {list(known.shape)} and {entry.dtype} "
            f"{list(entry.shape)}"
        )
    known.blocks.extend(entry.blocks)


def _merge_values(into: dict[str, Any], values: Mapping[str, Any], key: str) -> None:
    for name, value in values.items():
        place = f"{key}.{name}"
        if name not in into:
            into[name] = copy.deepcopy(value)
        elif isinstance(value, dict) and isinstance(into[name], dict):
            _merge_values(into[name], value, place)
        elif into[name] != value:
            raise ManifestError(f"ranks disagree about {place}: {into[name]!r} and {value!r}")


def generation_of(folder: Path) -> str:
    """Returns the generation that made a complete folder, from the head of its manifest.

    Raises:
        FileNotFoundError: there is no manifest.
    """
    try:
        with given_files.open_regular(folder / FILE_NAME) as file:
            head = file.read(4096)
    except NotADirectoryError as error:
        raise FileNotFoundError(str(error)) from None
    match = re.search(rb'"generation":"([\w-]+)"', head)
    return match[1].decode() if match else ""
