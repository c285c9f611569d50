"""Writes a zip file from front to back, of stored records whose data is aligned. No torch.

Each record has a data descriptor after its data, so that its checksum need not be known before.
Records and places beyond 4 GiB get the zip64 fields. ``torch.load``, Python's ``zipfile`` and
``unzip`` read the file.

Source: PKWARE APPNOTE 6.3.10, sections 4.3 to 4.5.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import pack
from typing import NamedTuple, Protocol

_LIMIT_32 = 0xFFFFFFFF
_LIMIT_16 = 0xFFFF
_FLAGS = 0x0808  # a data descriptor follows; names are UTF-8
_DOS_DATE = 0x21  # 1980-01-01, so that equal content gives equal files
_PADDING_ID = 0x4246  # "FB", as in torch's files
_VERSION, _VERSION_64 = 20, 45  # the release of the format that a reader needs


class Sink(Protocol):
    """The receiver of the bytes: ``_C.FileWriter``."""

    @property
    def position(self) -> int: ...
    def append(self, data: bytes) -> None: ...
    def take_crc32(self) -> int: ...


class _Record(NamedTuple):
    name: bytes
    header_offset: int
    num_bytes: int
    crc32: int


class ZipStream:
    """Writes records behind what ``sink`` has; ``close`` ends the archive.

    Places in the archive count from its first byte.
    """

    def __init__(self, sink: Sink, alignment: int = 64) -> None:
        self._sink = sink
        self._begin = sink.position
        self._alignment = alignment
        self._records: list[_Record] = []

    def add(self, name: str, num_bytes: int, write: Callable[[], None]) -> int:
        """Adds a record of ``num_bytes`` bytes, which ``write`` appends to the sink.

        Returns:
            offset of its data in the file.
        """
        sink, encoded, position = self._sink, name.encode(), self._sink.position
        is_large = num_bytes >= _LIMIT_32
        version, size = (_VERSION_64, _LIMIT_32) if is_large else (_VERSION, 0)
        extra = pack("<HHQQ", 1, 16, 0, 0) if is_large else b""
        padding = -(position + 30 + len(encoded) + len(extra) + 4) % self._alignment
        extra += pack("<HH", _PADDING_ID, padding) + bytes(padding)
        head = pack("<4sHHHHHI", b"PK\x03\x04", version, _FLAGS, 0, 0, _DOS_DATE, 0)
        head += pack("<IIHH", size, size, len(encoded), len(extra))
        sink.append(head + encoded + extra)
        begin = sink.position
        sink.take_crc32()
        write()
        came = sink.position - begin
        if came != num_bytes:
            raise ValueError(f"record {name}: {num_bytes} bytes were announced, {came} arrived")
        crc = sink.take_crc32()
        sizes = "<QQ" if is_large else "<II"
        sink.append(pack("<4sI", b"PK\x07\x08", crc) + pack(sizes, num_bytes, num_bytes))
        self._records.append(_Record(encoded, position - self._begin, num_bytes, crc))
        return begin

    def add_bytes(self, name: str, data: bytes) -> int:
        return self.add(name, len(data), lambda: self._sink.append(data))

    def close(self) -> None:
        begin = self._sink.position - self._begin
        for record in self._records:
            self._sink.append(_central_header(record))
        end, count = self._sink.position - self._begin, len(self._records)
        if count >= _LIMIT_16 or end >= _LIMIT_32:
            tail = pack("<4sQHHII", b"PK\x06\x06", 44, _VERSION_64, _VERSION_64, 0, 0)
            tail += pack("<QQQQ", count, count, end - begin, begin)
            self._sink.append(tail + pack("<4sIQI", b"PK\x06\x07", 0, end, 1))
        count, size = min(count, _LIMIT_16), min(end - begin, _LIMIT_32)
        tail = pack("<4sHHHH", b"PK\x05\x06", 0, 0, count, count)
        self._sink.append(tail + pack("<IIH", size, min(begin, _LIMIT_32), 0))


def _central_header(record: _Record) -> bytes:
    sizes = [record.num_bytes, record.num_bytes, record.header_offset]
    large = [size for size in sizes if size >= _LIMIT_32]
    extra = pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    version = _VERSION_64 if large else _VERSION
    short = [min(size, _LIMIT_32) for size in sizes]
    head = pack("<4sHHHHHH", b"PK\x01\x02", version, version, _FLAGS, 0, 0, _DOS_DATE)
    head += pack("<IIIHH", record.crc32, *short[:2], len(record.name), len(extra))
    head += pack("<HHHII", 0, 0, 0, 0, short[2])
    return head + record.name + extra
