"""``.pt`` files of ours are those of ``torch.save`` to code that reads them."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from smp import _C
from smp.checkpoint import archive, zip_stream
from smp.checkpoint.archive import Deferred, WriteOptions
from smp.checkpoint.manifest import ITEM_BYTES

# Small, so that every tensor lies in several buffers and chunks.
_SMALL = WriteOptions(buffer_bytes=4096, chunk_bytes=1000)
_DTYPES = [name for name in ITEM_BYTES if hasattr(torch, name)]


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def _equal(a: Any, b: Any) -> bool:
    """Same kinds, same values, bit by bit."""
    if isinstance(a, torch.Tensor):
        a, b = (t.resolve_conj().resolve_neg().contiguous() for t in (a, b))
        same = (a.dtype, a.shape) == (b.dtype, b.shape)
        return same and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and bool(a == b)


def _load(path: Path, mmap: bool) -> Any:
    return torch.load(path, weights_only=True, mmap=mmap)


@pytest.mark.parametrize("mmap", [True, False])
def test_structures_come_back_as_from_torch_save(tmp_path: Path, mmap: bool) -> None:
    structure = {
        "module": OrderedDict(w=_random((37, 41), torch.float32), b=torch.ones(3)),
        "list": [1, -2.5, None, True, "text", b"bytes", (torch.arange(5), 2**70), 1j],
        "empty": [torch.zeros(0), torch.zeros(3, 0, 2), {}, [], ()],
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "columns": _random((30, 50), torch.float32)[:, 3:17],
        "transposed": _random((7, 5, 3), torch.float16).permute(2, 0, 1),
        "expanded": torch.ones(1).expand(9),
        "conjugate": torch.complex(torch.ones(4), torch.arange(4.0)).conj(),
        "negative": torch.complex(torch.ones(4), torch.arange(4.0)).conj().imag,
        "parameter": torch.nn.Parameter(torch.ones(2)).detach(),
        "torch": [torch.Size((2, 3)), torch.bfloat16, torch.device("cuda", 1)],
        3: {(1, "a"): torch.ones(2)},
    }
    written = archive.write(tmp_path / "ours.pt", structure, _SMALL)
    torch.save(structure, tmp_path / "theirs.pt")
    ours, theirs = _load(tmp_path / "ours.pt", mmap), _load(tmp_path / "theirs.pt", mmap)
    assert _equal(ours, theirs)
    assert _equal(ours, structure)
    assert len(written.places) == 13
    assert written.record.num_bytes == (tmp_path / "ours.pt").stat().st_size


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("name", _DTYPES)
def test_every_dtype(tmp_path: Path, name: str) -> None:
    tensor = _random((5, 7, 11), getattr(torch, name))
    archive.write(tmp_path / "a.pt", {"t": tensor, "s": tensor[2]}, _SMALL)
    for mmap in (True, False):
        loaded = _load(tmp_path / "a.pt", mmap)
        assert _equal(loaded["t"], tensor) and _equal(loaded["s"], tensor[2])


def test_places_are_where_the_bytes_lie(tmp_path: Path) -> None:
    shared = torch.randn(1000)
    structure = {
        "a": torch.randn(33, 9),
        "t": torch.randn(33, 9).t(),
        "views": [shared[:600], shared[400:]],
        "later": Deferred((4, 2), torch.int64, lambda: torch.arange(8).view(2, 4).t()),
    }
    written = archive.write(tmp_path / "a.pt", structure, _SMALL)
    loaded = _load(tmp_path / "a.pt", mmap=False)
    content = (tmp_path / "a.pt").read_bytes()
    assert [place.keys for place in written.places] == [
        ("a",),
        ("t",),
        ("views", 0),
        ("views", 1),
        ("later",),
    ]
    for place in written.places:
        tensor = loaded
        for key in place.keys:
            tensor = tensor[key]
        count = tensor.numel() * tensor.dtype.itemsize
        assert content[place.offset : place.offset + count] == tensor.numpy().tobytes()
        assert place.offset % 64 == 0 or place.keys == ("views", 1)
        reader = _C.FileReader(
            str(tmp_path / "a.pt"),
            written.record.num_bytes,
            written.record.chunk_bytes,
            written.record.crc32,
        )
        into = torch.empty(place.shape, dtype=place.dtype)
        reader.read(place.offset, into)
        assert torch.equal(into, tensor)


def test_memory_is_shared_as_before(tmp_path: Path) -> None:
    flat = torch.arange(100.0)
    tied = torch.randn(10, 10)
    lazy = Deferred((50,), torch.float32, lambda: torch.ones(50))
    structure = {
        "overlapping": [flat[:60], flat[40:80]],
        "beside": [flat[80:90], flat[90:]],
        "tied": [tied, tied, tied.view(-1)],
        "lazy": [lazy, lazy],
    }
    archive.write(tmp_path / "a.pt", structure)
    loaded = _load(tmp_path / "a.pt", mmap=False)
    assert _equal(loaded["overlapping"], structure["overlapping"])

    def storages(tensors: list[torch.Tensor]) -> int:
        return len({t.untyped_storage().data_ptr() for t in tensors})

    assert storages(loaded["overlapping"]) == 1
    assert storages(loaded["beside"]) == 2
    assert storages(loaded["tied"]) == 1
    assert storages(loaded["lazy"]) == 1
    loaded["overlapping"][0][50] = -1
    assert loaded["overlapping"][1][10] == -1
    # The file holds only the named part of the flat buffer.
    assert loaded["overlapping"][0].untyped_storage().nbytes() == 80 * 4
    with zipfile.ZipFile(tmp_path / "a.pt") as file:
        assert sum("/data/" in name for name in file.namelist()) == 5


def test_zip_tools_find_no_fault(tmp_path: Path) -> None:
    structure = {f"t{i}": torch.randn(i) for i in range(50)}
    archive.write(tmp_path / "a.pt", structure, _SMALL)
    with zipfile.ZipFile(tmp_path / "a.pt") as file:
        assert file.testzip() is None
        assert all(info.compress_type == zipfile.ZIP_STORED for info in file.infolist())


def test_equal_content_gives_equal_files(tmp_path: Path) -> None:
    structure = {"a": torch.arange(3000), "b": [1, 2]}
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        archive.write(tmp_path / folder / "a.pt", structure)
    assert (tmp_path / "x" / "a.pt").read_bytes() == (tmp_path / "y" / "a.pt").read_bytes()


def test_deferred_tensors_are_made_one_after_the_other(tmp_path: Path) -> None:
    alive: list[torch.Tensor] = []
    order = []

    def make(i: int) -> torch.Tensor:
        assert all(t._use_count() <= 1 for t in alive)  # type: ignore[attr-defined]
        order.append(i)
        return torch.full((1000,), float(i))

    structure = [Deferred((1000,), torch.float32, lambda i=i: make(i)) for i in range(5)]
    seen: list[int] = []
    archive.write(tmp_path / "a.pt", structure, WriteOptions(4096, 2, 1000, seen.append))
    assert order == [0, 1, 2, 3, 4]
    # Two buffers of 4096 bytes may still be on their way.
    assert len(seen) == 5 and seen == sorted(seen) and seen[-1] > 5 * 4000 - 2 * 4096
    assert [float(t[0]) for t in _load(tmp_path / "a.pt", mmap=True)] == [0, 1, 2, 3, 4]


class _Hostile:
    def __reduce__(self) -> Any:
        raise AssertionError("was pickled")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [_Hostile()]}, r"_Hostile at \['a'\]\[0\]"),
        ({"a": {1, 2}}, r"builtins.set at \['a'\]"),
        ({_Hostile(): 1}, r"_Hostile"),
        (torch.zeros(3).to_sparse(), "sparse"),
        ({"m": torch.zeros(3, device="meta")}, r"\['m'\].*meta"),
        (Deferred((3,), torch.float32, lambda: torch.zeros(4)), "announced"),
        (Deferred((3,), torch.float32, lambda: torch.zeros(3).double()), "announced"),
    ],
)
def test_what_cannot_be_written_is_named(tmp_path: Path, value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        archive.write(tmp_path / "a.pt", value)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="none/a.pt.*No such file"):
        archive.write(tmp_path / "none" / "a.pt", torch.zeros(3))
    full = Path("/dev/full")
    if full.exists():
        with pytest.raises(RuntimeError, match="/dev/full.*No space left"):
            archive.write(full, torch.zeros(3))


class _Holes:
    """Counts bytes of records without keeping them, so that they can be huge."""

    def __init__(self, file: Any) -> None:
        self.position = 0
        self._file = file

    def append(self, data: bytes) -> None:
        self._file.seek(self.position)
        self._file.write(data)
        self.position += len(data)

    def take_crc32(self) -> int:
        return 0


def test_records_beyond_4_gib_are_zip64(tmp_path: Path) -> None:
    huge = (4 << 30) + 5
    with open(tmp_path / "a.pt", "wb") as file:
        sink = _Holes(file)

        def skip() -> None:
            sink.position += huge

        stream = zip_stream.ZipStream(sink)
        begins = [stream.add("a/data/0", huge, skip), stream.add_bytes("a/small", b"abc")]
        stream.add_bytes("a/version", b"3\n")
        stream.close()
    with zipfile.ZipFile(tmp_path / "a.pt") as read:
        infos = read.infolist()
        assert [info.file_size for info in infos] == [huge, 3, 2]
        assert infos[1].header_offset > 4 << 30
        with open(tmp_path / "a.pt", "rb") as raw:
            raw.seek(begins[1])
            assert raw.read(3) == b"abc"
    torch_reader = torch._C.PyTorchFileReader(str(tmp_path / "a.pt"))
    assert [torch_reader.get_record_offset(n) for n in ("data/0", "small")] == begins
