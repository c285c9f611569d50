"""Writes a zip file from front to back, of stored records whose data is aligned. No torch.

Each record has a data descriptor after its data, so that its checksum need not be known before.
Records and places beyond 4 GiB get the zip64 fields. ``torch.load``, Python's ``zipfile`` and
``unzip`` read the file.

Source: PKWARE APPNOTE 6.3.10, sections 4.3 to 4.5.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

_LIMIT_32 = 0xFFFFFFFF
_LIMIT_16 = 0xFFFF
_FLAGS = 0x0808  # a data descriptor follows; names are UTF-8
_DOS_DATE = 0x21  # 1980-01-01, so that equal content gives equal files
_PADDING_ID = 0x4246  # "FB", as in torch's files


class Sink(Protocol):
    """The receiver of the bytes: ``_C.FileWriter``."""

    @property
    def position(self) -> int: ...
    def append(self, data: bytes) -> None: ...
    def take_crc32(self) -> int: ...


@dataclass(frozen=True)
class _Record:
    name: bytes
    header_offset: int
    num_bytes: int
    crc32: int


class ZipStream:
    """Writes records into ``sink``, which is at its beginning; ``close`` ends the archive."""

    def __init__(self, sink: Sink, alignment: int = 64) -> None:
        self._sink = sink
        self._alignment = alignment
        self._records: list[_Record] = []

    def add(self, name: str, num_bytes: int, write: Callable[[], None]) -> int:
        """Adds a record of ``num_bytes`` bytes, which ``write`` appends to the sink.

        Returns:
            offset of its data in the file.
        """
        encoded = name.encode()
        header_offset = self._sink.position
        is_large = num_bytes >= _LIMIT_32
        self._sink.append(self._local_header(encoded, is_large))
        begin = self._sink.position
        self._sink.take_crc32()
        write()
        if self._sink.position - begin != num_bytes:
            raise ValueError(
                f"record {name}: {num_bytes} bytes were announced, {self._sink.position - begin} "
                "arrived"
            )
        crc = self._sink.take_crc32()
        sizes = "<QQ" if is_large else "<II"
        self._sink.append(
            b"PK\x07\x08" + struct.pack("<I", crc) + struct.pack(sizes, num_bytes, num_bytes)
        )
        self._records.append(_Record(encoded, header_offset, num_bytes, crc))
        return begin

    def add_bytes(self, name: str, data: bytes) -> int:
        return self.add(name, len(data), lambda: self._sink.append(data))

    def close(self) -> None:
        begin = self._sink.position
        for record in self._records:
            self._sink.append(_central_header(record))
        end = self._sink.position
        count = len(self._records)
        if count >= _LIMIT_16 or end >= _LIMIT_32:
            self._sink.append(
                struct.pack(
                    "<4sQHHIIQQQQ",
                    b"PK\x06\x06",
                    44,
                    45,
                    45,
                    0,
                    0,
                    count,
                    count,
                    end - begin,
                    begin,
                )
                + struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
            )
        self._sink.append(
            struct.pack(
                "<4sHHHHIIH",
                b"PK\x05\x06",
                0,
                0,
                min(count, _LIMIT_16),
                min(count, _LIMIT_16),
                min(end - begin, _LIMIT_32),
                min(begin, _LIMIT_32),
                0,
            )
        )

    def _local_header(self, name: bytes, is_large: bool) -> bytes:
        extra = struct.pack("<HHQQ", 1, 16, 0, 0) if is_large else b""
        start = self._sink.position + 30 + len(name) + len(extra) + 4
        extra += struct.pack("<HH", _PADDING_ID, -start % self._alignment)
        extra += bytes(-start % self._alignment)
        size = _LIMIT_32 if is_large else 0
        return (
            struct.pack(
                "<4sHHHHHIIIHH",
                b"PK\x03\x04",
                45 if is_large else 20,
                _FLAGS,
                0,
                0,
                _DOS_DATE,
                0,
                size,
                size,
                len(name),
                len(extra),
            )
            + name
            + extra
        )


def _central_header(record: _Record) -> bytes:
    sizes = [record.num_bytes, record.num_bytes, record.header_offset]
    large = [size for size in sizes if size >= _LIMIT_32]
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    version = 45 if large else 20
    return (
        struct.pack(
            "<4sHHHHHHIIIHHHHHII",
            b"PK\x01\x02",
            version,
            version,
            _FLAGS,
            0,
            0,
            _DOS_DATE,
            record.crc32,
            min(sizes[0], _LIMIT_32),
            min(sizes[1], _LIMIT_32),
            len(record.name),
            len(extra),
            0,
            0,
            0,
            0,
            min(sizes[2], _LIMIT_32),
        )
        + record.name
        + extra
    )
