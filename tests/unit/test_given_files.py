"""FIFOs and devices in the place of files, and deeply nested JSON: each raises one error, soon."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from smp_cli import sagemaker

import smp._C as _C
from smp.checkpoint import files, folder, huggingface, user_content
from smp.checkpoint import manifest as manifests
from smp.checkpoint.manifest import Block, FileRecord, Layout, Manifest, ManifestError, StoredEntry
from smp.config import given_files
from smp.config.sources import read_launcher_config, read_user_config
from smp.partition import partition_file
from smp.planning import hardware
from smp.tensor_parallel.parts import Part
from smp.v1.sharded_checkpoint import _folder
from smp.world import job_secret


class _Empty:
    names = ()


DEEP = "[" * 50_000 + "]" * 50_000
DEEPER_THAN_ALLOWED = "[" * 150 + "]" * 150


@pytest.fixture(autouse=True)
def no_end_is_an_error() -> Iterator[None]:
    """A wait for a FIFO would never end; Python's own calls end with this."""

    def give_up(*_: object) -> None:
        raise TimeoutError("it waits or reads without an end")

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 20.0)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": read_user_config,
    "launcher.json": lambda path: sagemaker.read_config(str(path)),
    "manifest.json": lambda path: manifests.read(path.parent),
    "generation/manifest.json": lambda path: manifests.generation_of(path.parent),
    "newest": lambda path: folder.newest(path.parent),
    "v1/newest": lambda path: _folder(path.parent, None),
    "a.pt": huggingface.open_weights,
    "a.safetensors": huggingface.open_weights,
    "a.index.json": huggingface.open_weights,
    "user_content.pt": lambda path: user_content.read(path, unsafe=False),
    "rank.pt": lambda path: files.load(str(path), partial=False),
    "record.pt": manifests.record_of,
    "secret": lambda path: job_secret.given_secret({"SMP_JOB_SECRET_FILE": str(path)}),
    "partition.txt": lambda path: partition_file.read(path, _Empty(), 2, 1),  # type: ignore[arg-type]
    "data.pt": lambda path: _C.FileReader(str(path), 16, 16, (0,)),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_only_regular_files_are_read(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    errors = (OSError, ValueError, RuntimeError)
    with pytest.raises(errors, match="expected a regular file") as told:
        READERS[name](path)
    assert not isinstance(told.value, TimeoutError)
    assert path.name in str(told.value)


def test_links_to_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("first\r\nsecond")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    assert given_files.read_text(tmp_path / "link") == "first\nsecond"
    with pytest.raises(IsADirectoryError):
        given_files.read_text(tmp_path)
    with pytest.raises(OSError, match="expected at most 5 bytes"):
        given_files.read_bytes(tmp_path / "there", most_bytes=5)


def test_newest_is_as_short_as_a_name(tmp_path: Path) -> None:
    (tmp_path / "newest").write_text("x" * 10_000)
    with pytest.raises(ManifestError, match="newest cannot be read: expected at most 4096 bytes"):
        folder.newest(tmp_path)


# ---- depth ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", [DEEP, DEEPER_THAN_ALLOWED], ids=["deep", "deeper"])
def test_deep_settings_are_refused(tmp_path: Path, text: str) -> None:
    deep = f'{{"partitions": {text}}}'
    (tmp_path / "a.json").write_text(deep)
    (tmp_path / "a.yaml").write_text(f"partitions: {'[' * 150}{']' * 150}")
    for read in (
        lambda: read_user_config(str(tmp_path / "a.json")),
        lambda: read_user_config(str(tmp_path / "a.yaml")),
        lambda: read_launcher_config({"SM_HP_MP_PARAMETERS": deep}),
        lambda: hardware.read(deep, "a.json"),
        lambda: Manifest.from_text(manifests.seal(f'{{"values":{deep}'), "a.json"),
    ):
        with pytest.raises(ValueError, match="nested in more than 100 levels") as told:
            read()
        assert len(str(told.value)) < 300


def test_depth_that_people_write_is_read() -> None:
    value: Any = 1
    for _ in range(given_files.MOST_LEVELS):
        value = {"a": [value]} if isinstance(value, int) else [value]
    for _ in range(2):
        value = value[0]
    assert given_files.parse_json(json.dumps(value)) == value


def test_aliases_of_yaml_stand_for_so_many_values_only(tmp_path: Path) -> None:
    lines = ["a0: &a0 [[1], [1]]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    (tmp_path / "a.yaml").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="aliases stand for more than"):
        read_user_config(str(tmp_path / "a.yaml"))
    (tmp_path / "b.yaml").write_text("a: &a [*a]")
    with pytest.raises(ValueError, match="nested in more than 100 levels"):
        read_user_config(str(tmp_path / "b.yaml"))


@pytest.mark.parametrize("content", [b'{"a": \xff}', b'{"a": ' + b"9" * 10_000 + b"}"])
def test_what_is_no_text_or_number_is_one_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match="^smp config: .*a.json is not"):
        read_user_config(str(tmp_path / "a.json"))


def test_an_index_names_no_index(tmp_path: Path) -> None:
    index = tmp_path / "a.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.index.json"}}))
    with pytest.raises(ValueError, match="not an index of weights: weight_map names another index"):
        huggingface.open_weights(index)


# ---- blocks --------------------------------------------------------------------------


@pytest.mark.parametrize("part", [Part.whole((5000, 8)), Part(1, 0, 4, 8, 0, 20_000)])
def test_blocks_that_repeat_are_refused_before_they_are_planned(part: Part) -> None:
    entry = StoredEntry("float32", (5000, 8), [Block("a.pt", 0, part)])
    record = FileRecord(160_000, 1 << 20, (0,))
    manifest = Manifest("g", {}, Layout({}, {"pp": 1}), {"a.pt": record}, {"w": entry}, {})
    value = json.loads(manifest.to_text())
    del value["crc32"]
    value["entries"]["w"]["blocks"] *= 300_000
    text = manifests.seal(json.dumps(value)[:-1])
    with pytest.raises(ManifestError, match=r"w.blocks\[\d\]: expected each element once in a.pt"):
        Manifest.from_text(text, "manifest.json")


def test_ranks_may_store_the_same_elements_in_files_of_their_own() -> None:
    blocks = [Block(name, 0, Part.whole((2, 2))) for name in ("a.pt", "b.pt")]
    record = FileRecord(16, 16, (0,))
    manifest = Manifest(
        "g",
        {},
        Layout({}, {"pp": 1}),
        {"a.pt": record, "b.pt": record},
        {"w": StoredEntry("float32", (2, 2), blocks)},
        {},
    )
    assert Manifest.from_text(manifest.to_text(), "manifest.json") == manifest
    assert torch.float32.itemsize * 4 == record.num_bytes
