"""Manifests come back as written; damaged, hostile and foreign ones are refused."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smp.checkpoint import manifest as manifests
from smp.checkpoint.manifest import (
    Block,
    FileRecord,
    Layout,
    Manifest,
    ManifestError,
    Piece,
    StoredEntry,
    seal,
)
from smp.tensor_parallel.parts import Part

_SHAPE = (8, 6)


def _manifest() -> Manifest:
    cut = Part(1, 0, 3, 6, 4, 20)
    grouped = Part(1, 0, 1, 4, 0, 12, (2, 4, 6))
    blocks = [
        Block("a.pt", 64, Part.whole(_SHAPE)),
        Block("b.pt", 0, cut),
        Block("b.pt", 80, grouped),
    ]
    return Manifest(
        "g-1",
        {"smp": "1.0", "torch": "2.11"},
        Layout({"pipeline_parallel_degree": 2}, {"pp": 2, "tp": 1}),
        {"a.pt": FileRecord(500, 200, (1, 2, 3)), "b.pt": FileRecord(200, 200, (2**32 - 1,))},
        {"model/w": StoredEntry("float32", _SHAPE, blocks), "model/s": StoredEntry("bool", (), [])},
        {"steps": 3, "groups": [{"lr": 0.1, "name": "ü"}], "scale": float("inf")},
    )


def _text(change: Any = None) -> bytes:
    """A manifest with a valid checksum after `change` of its object."""
    value = json.loads(_manifest().to_text())
    del value["crc32"]
    if change is not None:
        change(value)
    return seal(json.dumps(value)[:-1])


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    manifest = _manifest()
    (tmp_path / manifests.FILE_NAME).write_bytes(manifest.to_text())
    assert manifests.read(tmp_path) == manifest
    assert manifests.generation_of(tmp_path) == "g-1"
    assert json.loads(manifest.to_text())["entries"]["model/w"]["dtype"] == "float32"
    assert Manifest.from_text(_text(), "x") == manifest


def test_pieces_make_a_manifest() -> None:
    whole = Part.whole((4,))
    halves = [Part.flat((4,), 0, 2), Part.flat((4,), 2, 2)]
    pieces = [
        Piece(
            {f"f{rank}": FileRecord(8, 8, (rank,))},
            {"model/w": StoredEntry("float32", (4,), [Block(f"f{rank}", 0, halves[rank])])},
            {"steps": 5, "groups": {f"p{rank}": {"lr": rank}}},
        )
        for rank in range(2)
    ]
    travelled = [Piece.from_json(json.loads(json.dumps(p.to_json())), "part") for p in pieces]
    assert travelled == pieces
    manifest = Manifest.assemble("g", {}, Layout({}, {}), travelled)
    assert [b.part for b in manifest.entries["model/w"].blocks] == halves
    assert manifest.values == {"steps": 5, "groups": {"p0": {"lr": 0}, "p1": {"lr": 1}}}
    assert pieces[0].values["groups"] == {"p0": {"lr": 0}}, "pieces stay as they were"

    for other, text in [
        (Piece({"f0": FileRecord(8, 8, (1,))}), "two ranks wrote the file f0"),
        (Piece({}, {"model/w": StoredEntry("float16", (4,), [])}), "disagree about model/w"),
        (Piece({}, {"model/w": StoredEntry("float32", (5,), [])}), "disagree about model/w"),
        (Piece({}, {}, {"steps": 6}), "disagree about values.steps: 5 and 6"),
        (Piece({}, {}, {"groups": {"p0": {"lr": 9}}}), "values.groups.p0.lr"),
    ]:
        with pytest.raises(ManifestError, match=text):
            Manifest.assemble("g", {}, Layout({}, {}), [*pieces, other])
    assert whole.flat_numel == 4


def test_values_that_are_no_json_are_named() -> None:
    manifest = _manifest()
    manifest.values["scheduler"] = object()
    with pytest.raises(ManifestError, match="values.scheduler"):
        manifest.to_text()


def test_another_version_says_who_wrote_it() -> None:
    with pytest.raises(ManifestError, match=r"m: format 2, this smp reads 1.*smp 1\.0"):
        Manifest.from_text(_text(lambda v: v.update(format=2)), "m")


def _set(*keys: Any) -> Any:
    *path, last, new = keys

    def change(value: Any) -> None:
        for key in path:
            value = value[key]
        value[last] = new

    return change


_W = ("entries", "model/w")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (_set("format", "1"), "format"),
        (_set("unknown", 1), "unknown"),
        (lambda v: v.pop("files"), "files"),
        (_set("layout", []), "layout"),
        (_set("layout", "sizes", {"pp": 0}), "layout.sizes.pp"),
        (_set("versions", "smp", 3), "versions.smp"),
        (_set("files", "../evil", {}), "files"),
        (_set("files", "/etc/passwd", {}), "files"),
        (_set("files", "manifest.json", {}), "files"),
        (_set("files", "a.pt", "num_bytes", -1), "files.a.pt.num_bytes"),
        (_set("files", "a.pt", "num_bytes", 1e3), "files.a.pt.num_bytes"),
        (_set("files", "a.pt", "num_bytes", True), "files.a.pt.num_bytes"),
        (_set("files", "a.pt", "chunk_bytes", 0), "files.a.pt.chunk_bytes"),
        (_set("files", "a.pt", "crc32", [1, 2]), "files.a.pt.crc32"),
        (_set("files", "a.pt", "crc32", [1, 2, 2**32]), "files.a.pt.crc32"),
        (_set(*_W, "dtype", "float31"), "dtype"),
        (_set(*_W, "dtype", "__class__"), "dtype"),
        (_set(*_W, "shape", [8, 7]), r"entries.model/w.blocks\[1\]"),
        (_set(*_W, "shape", [2**59, 2**59]), "shape"),
        (_set(*_W, "shape", [-8, -6]), "shape"),
        (_set(*_W, "blocks", 0, "file", "c.pt"), r"blocks\[0\].file"),
        (_set(*_W, "blocks", 0, "offset", -64), r"blocks\[0\].offset"),
        (_set(*_W, "blocks", 0, "offset", 400), r"blocks\[0\].offset"),
        (_set(*_W, "blocks", 1, "cut", [2, 0, 3, 6]), r"blocks\[1\]"),
        (_set(*_W, "blocks", 1, "cut", [1, 0, 7, 6]), r"blocks\[1\]"),
        (_set(*_W, "blocks", 1, "cut", [1, 3, 0, 6]), r"blocks\[1\]"),
        (_set(*_W, "blocks", 1, "cut", [1, 0, 3]), r"blocks\[1\].cut"),
        (_set(*_W, "blocks", 1, "flat", [20, 20]), r"blocks\[1\]"),
        (_set(*_W, "blocks", 1, "unknown", 3), r"blocks\[1\].unknown"),
        (_set(*_W, "blocks", 2, "view", [2, 4, 7]), r"blocks\[2\]"),
        (_set("values", []), "values"),
    ],
)
def test_malformed_content_names_file_and_key(change: Any, key: str) -> None:
    with pytest.raises(ManifestError, match=rf"folder/manifest.json: key .*{key}"):
        Manifest.from_text(_text(change), "folder/manifest.json")


def test_a_hostile_number_or_depth_is_an_error() -> None:
    for body in ('{"format":' + "9" * 5000, '{"format":' + "[" * 100000):
        with pytest.raises(ManifestError, match="m: "):
            Manifest.from_text(seal(body), "m")


def test_a_pickle_in_its_place_is_not_run(tmp_path: Path) -> None:
    import pickle

    class Runs:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    hostile = pickle.dumps(Runs())
    pickle.loads(hostile)
    assert (tmp_path / "ran").exists(), "the pickle works"
    (tmp_path / "ran").unlink()
    sealed = hostile + b',\n"crc32":"%08x"}\n' % zlib.crc32(hostile)
    for text in (hostile, sealed):
        (tmp_path / manifests.FILE_NAME).write_bytes(text)
        with pytest.raises(ManifestError, match="manifest.json"):
            manifests.read(tmp_path)
    assert not (tmp_path / "ran").exists()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    result = [(value, key) for key, _ in items]
    for _, item in items:
        if isinstance(item, dict | list):
            result += _nodes(item)
    return result


def test_fuzz_bytes() -> None:
    """Cut, flipped, or with bytes in between: always an error, since the checksum differs."""
    refused: Counter[str] = Counter()

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def damage(data: st.DataObject) -> None:
        text = bytearray(_manifest().to_text())
        kind = data.draw(st.sampled_from(["cut", "flip", "insert", "delete"]))
        at = data.draw(st.integers(0, len(text) - 1))
        if kind == "cut":
            del text[at:]
        elif kind == "flip":
            text[at] ^= data.draw(st.integers(1, 255))
        elif kind == "insert":
            text[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            del text[at : at + data.draw(st.integers(1, 40))]
        if bytes(text) == _manifest().to_text():
            return
        with pytest.raises(ManifestError, match="^m: "):
            Manifest.from_text(bytes(text), "m")
        refused[kind] += 1

    damage()
    assert len(refused) == 4 and min(refused.values()) >= 5, refused


def test_fuzz_content() -> None:
    """Puts any value anywhere, under a valid checksum: the manifest that is read is consistent."""
    counts: Counter[str] = Counter()

    @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def change_content(data: st.DataObject) -> None:
        def change(value: Any) -> None:
            for _ in range(data.draw(st.integers(1, 3))):
                nodes = _nodes(value)
                holder, key = nodes[data.draw(st.integers(0, len(nodes) - 1))]
                kind = data.draw(st.sampled_from(["replace", "delete", "nudge"]))
                if kind == "delete":
                    del holder[key]
                elif kind == "nudge" and type(holder[key]) is int:
                    holder[key] += data.draw(st.sampled_from([-1, 1, 2**31, 2**63]))
                else:
                    holder[key] = data.draw(_JSON)

        text = _text(change)
        try:
            manifest = Manifest.from_text(text, "m")
        except ManifestError as error:
            assert str(error).startswith("m: ")
            counts["refused"] += 1
            return
        counts["read"] += 1
        for name, entry in manifest.entries.items():
            for block in entry.blocks:
                block.part.check(entry.shape)
                end = block.offset + block.part.flat_numel * entry.item_bytes
                assert end <= manifest.files[block.file].num_bytes, name

    change_content()
    assert counts["refused"] >= 5 and counts["read"] >= 1, counts
