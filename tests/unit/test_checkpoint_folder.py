"""Folders of checkpoints appear whole or not at all, whenever their writer dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from smp.checkpoint import file_system, folder, left_over, locks
from smp.checkpoint import manifest as manifests
from smp.checkpoint.file_generation import FileGeneration
from smp.checkpoint.folder import Generation
from smp.checkpoint.manifest import FileRecord, Layout, Manifest, ManifestError, Piece
from tests.patience import PATIENCE_S

_PROGRAM = Path(__file__).with_name("checkpoint_crash.py")


def _manifest(generation: Generation, files: dict[str, FileRecord] | None = None) -> Manifest:
    return Manifest(generation.generation, {}, Layout({}, {}), files or {}, {}, {})


def _save(path: Path, name: str, number: str, keep: int | None = None) -> Generation:
    generation = Generation.begin(path, name, number)
    (generation.folder / "a.pt").write_bytes(number.encode())
    record = manifests.record_of(generation.folder / "a.pt")
    generation.commit(_manifest(generation, {"a.pt": record}), keep)
    return generation


def _visible(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if not p.name.startswith("."))


def _hidden(path: Path) -> list[str]:
    return sorted(p.name for p in path.rglob(".*"))


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize(
    ("mode", "count"), [("random", 50), ("everywhere", 400), ("aside", 400), ("whole", 400)]
)
def test_a_killed_writer_leaves_nothing_partial(
    tmp_path: Path, mode: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int.from_bytes(os.urandom(3), "little")
    run = subprocess.run(
        [sys.executable, "-S", str(_PROGRAM), str(tmp_path), mode, str(count), str(seed)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 0, f"seed {seed}: {run.stderr}"
    counts = json.loads(run.stdout)
    with capsys.disabled():
        print(f"\n{mode}: {counts}", end=" ")
    assert counts["deaths that left something"] >= 10
    if mode == "random":
        assert counts["deaths"] == count and counts["saved"] >= 10
    else:
        assert counts["committed before death"] >= 3 and counts["not committed"] >= 20


def test_saving_and_finding(tmp_path: Path) -> None:
    path = tmp_path / "new" / "checkpoints"
    _save(path, "a_partial", "1")
    _save(path, "b_partial", "2")
    assert _visible(path) == ["a_partial", "b_partial", "newest"] and _hidden(path) == []
    assert (path / "newest").read_text() == "b_partial"
    assert folder.find(path, None) == path / "b_partial"
    assert folder.find(path, "a") == folder.find(path, "a_partial") == path / "a_partial"
    assert _visible(path / "a_partial") == ["a.pt", "manifest.json"]
    again = _save(path, "a_partial", "3")
    assert (path / "a_partial" / "a.pt").read_bytes() == b"3"
    assert folder.find(path, None) == path / "a_partial" and _hidden(path) == []
    assert again.committed() and not Generation(path, "b_partial", "9", None).committed()


def test_only_so_many_partial_checkpoints_are_kept(tmp_path: Path) -> None:
    (tmp_path / "mine_partial").mkdir()  # made by another program: no manifest
    _save(tmp_path, "full", "0")
    for number in range(1, 6):
        _save(tmp_path, f"s{number}_partial", str(number), keep=2)
    assert _visible(tmp_path) == ["full", "mine_partial", "newest", "s4_partial", "s5_partial"]
    _save(tmp_path, "s4_partial", "6", keep=1)
    assert _visible(tmp_path) == ["full", "mine_partial", "newest", "s4_partial"]
    _save(tmp_path, "s7_partial", "7", keep=0)
    assert "s7_partial" in _visible(tmp_path), "the one that is being saved stays"


def test_ranks_meet_through_the_folder(tmp_path: Path) -> None:
    first = Generation.begin(tmp_path, "a_partial", "1")
    second = Generation.join(tmp_path, "a_partial", "1")
    assert first.parts(range(2)) is None and first.committed() is None
    second.part_done(1, Piece(values={"x": 1}).to_json())
    assert first.parts(range(2)) is None and first.failures() == {}
    first.part_done(0, Piece().to_json())
    parts = first.parts(range(2))
    assert parts is not None and parts[1]["values"] == {"x": 1}
    second.part_failed(1, "no space")
    assert first.failures() == {1: "no space"}
    with pytest.raises(ValueError, match="only the rank that began"):
        second.commit(_manifest(second))
    assert second.committed() is None
    first.commit(_manifest(first))
    assert second.committed() is True and second.failures() == {}, "its folder has another name"
    assert _visible(tmp_path / "a_partial") == ["manifest.json"]

    third = Generation.begin(tmp_path, "a_partial", "2")
    other = Generation.join(tmp_path, "a_partial", "2")
    other.abandon()
    assert third.folder.is_dir() and other.committed() is None
    (third.folder / "failed_0.json").symlink_to("deleted while another rank looks")
    assert other.failures() == {}
    third.abandon()
    third.abandon()
    assert other.committed() is False and _hidden(tmp_path) == []
    assert folder.find(tmp_path, None) == tmp_path / "a_partial"


def test_a_damaged_part_is_not_accepted(tmp_path: Path) -> None:
    generation = Generation.begin(tmp_path, "a_partial", "1")
    generation.part_done(0, Piece().to_json())
    part = generation.folder / "part_0.json"
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(ManifestError, match="part_0.json.*cut off"):
        generation.parts([0])
    generation.abandon()


def test_a_file_that_is_short_is_not_committed(tmp_path: Path) -> None:
    generation = Generation.begin(tmp_path, "a_partial", "1")
    (generation.folder / "a.pt").write_bytes(b"123")
    for name, text in (("a.pt", "has 3, but 4 bytes"), ("b.pt", "is missing, but 4 bytes")):
        with pytest.raises(ManifestError, match=rf"{name} {text}"):
            generation.commit(_manifest(generation, {name: FileRecord(4, 4, (0,))}))
    generation.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_shared_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_system, "_SEE_SECONDS", 0.1)
    with pytest.raises(FileNotFoundError, match=f"host {socket.gethostname()} does not see"):
        Generation.join(tmp_path, "a_partial", "1")


def test_a_folder_may_appear_late(tmp_path: Path) -> None:
    def begin() -> None:
        time.sleep(0.2)
        begun.append(Generation.begin(tmp_path, "a_partial", "1"))

    begun: list[Generation] = []
    thread = threading.Thread(target=begin)
    thread.start()
    joined = Generation.join(tmp_path, "a_partial", "1")
    thread.join()
    assert joined.folder == begun[0].folder
    begun[0].abandon()


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "", "newest", "a\0b", "a\nb"])
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="tag of a checkpoint"):
        Generation.begin(tmp_path, name, "1")
    with pytest.raises(ValueError, match="tag of a checkpoint"):
        folder.find(tmp_path, name)
    (tmp_path / "newest").write_text(name)
    with pytest.raises(ManifestError, match="newest: .*tag of a checkpoint"):
        folder.find(tmp_path, None)


@pytest.mark.parametrize("generation", ["a/b", "..", "", "1.2", "a\n"])
def test_generations_are_plain_words(tmp_path: Path, generation: str) -> None:
    with pytest.raises(ValueError, match="letters, digits"):
        Generation.begin(tmp_path, "a", generation)


def test_what_is_not_there_is_said_with_what_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint has been saved there"):
        folder.find(tmp_path, None)
    _save(tmp_path, "a_partial", "1")
    (tmp_path / "c_partial").mkdir()
    for tag in ("b", "c"):
        with pytest.raises(FileNotFoundError, match=f"partial checkpoint '{tag}'.*a_partial"):
            folder.find(tmp_path, tag)
    (tmp_path / "newest").write_text("gone_partial")
    with pytest.raises(FileNotFoundError, match="'newest' in .* names 'gone_partial'"):
        folder.find(tmp_path, None)
    assert folder.newest_whole(tmp_path) is None
    (tmp_path / "newest").write_text("full")
    assert folder.newest_whole(tmp_path) is None
    (tmp_path / "full").write_bytes(b"x")
    assert folder.newest_whole(tmp_path) == tmp_path / "full"
    assert folder.find(tmp_path, None) == tmp_path / "a_partial"
    with pytest.raises(FileNotFoundError, match="'full' is a whole model.*partial=False"):
        folder.find(tmp_path, "full")


def test_a_running_job_is_left_alone(tmp_path: Path) -> None:
    """Two jobs save to one path: neither deletes what the other is writing."""
    running = Generation.begin(tmp_path, "a_partial", "job1")
    (running.folder / "model_0.pt").write_bytes(b"1")
    _save(tmp_path, "b_partial", "job2")
    assert (running.folder / "model_0.pt").read_bytes() == b"1"
    with pytest.raises(ValueError, match="being written by another process"):
        Generation.begin(tmp_path, "a_partial", "job1")
    running.commit(_manifest(running))
    assert _visible(tmp_path) == ["a_partial", "b_partial", "newest"] and _hidden(tmp_path) == []


def _die_after_begin(path: Path, number: str) -> Path:
    generation = Generation.begin(path, "a_partial", number)
    assert generation._lock is not None
    generation._lock.release(delete=False)  # as the kernel does for the dead
    return generation.folder


def test_dead_generations_are_deleted(tmp_path: Path) -> None:
    _die_after_begin(tmp_path, "1")
    aside = tmp_path / ".z_partial.deleted-1"
    aside.mkdir()
    (tmp_path / ".newest.writing-1").write_text("half")
    unknown = tmp_path / ".config"
    unknown.mkdir()
    _save(tmp_path, "b_partial", "2")
    assert _hidden(tmp_path) == [".config"]


def test_of_another_host_only_what_is_quiet_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other:
        other.setattr(socket, "gethostname", lambda: "elsewhere")
        left = _die_after_begin(tmp_path, "1")
    (left / "model_0.pt").write_bytes(b"1")
    left_over.recover(tmp_path)
    assert left.is_dir(), "locks need not reach that host"
    long_ago = time.time() - locks.QUIET_SECONDS - 10
    for path in (left / "model_0.pt", left):
        os.utime(path, (long_ago, long_ago))
    left_over.recover(tmp_path)
    assert _hidden(tmp_path) == []


def test_a_file_of_another_host_is_left_alone_while_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other:
        other.setattr(socket, "gethostname", lambda: "elsewhere")
        writing = FileGeneration.begin(tmp_path, "full.pt", "1")
    assert writing._lock is not None
    writing._lock.release(delete=False)  # as if that host's locks did not reach this one
    left_over.recover(tmp_path)
    assert writing.temporary.exists()
    long_ago = time.time() - locks.QUIET_SECONDS - 10
    os.utime(writing.temporary, (long_ago, long_ago))
    left_over.recover(tmp_path)
    assert _hidden(tmp_path) == []


def test_without_locks_only_what_is_quiet_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*args: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    running = Generation.begin(tmp_path, "a_partial", "1")
    _save(tmp_path, "b_partial", "2")
    assert running.folder.is_dir()
    running.commit(_manifest(running))
    assert _visible(tmp_path) == ["a_partial", "b_partial", "newest"]


def test_where_names_cannot_be_exchanged_the_old_one_is_found_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_system, "exchange", lambda first, second: False)
    _save(tmp_path, "a_partial", "1")
    _save(tmp_path, "a_partial", "2")
    assert (tmp_path / "a_partial" / "a.pt").read_bytes() == b"2"
    assert _hidden(tmp_path) == []
    (tmp_path / "a_partial").rename(tmp_path / ".a_partial.old-3")  # and then it died
    found = folder.find(tmp_path, None)
    assert (found / "a.pt").read_bytes() == b"2"
    _save(tmp_path, "b_partial", "4")
    assert (tmp_path / "a_partial" / "a.pt").read_bytes() == b"2" and _hidden(tmp_path) == []


def test_a_failed_write_leaves_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "user_content"
    file_system.write_file(path, b"old", unique="1")

    def fail(file: Any) -> None:
        file.write(b"half")
        raise KeyError("no")

    with pytest.raises(KeyError):
        file_system.write_file(path, fail, unique="2")
    assert path.read_bytes() == b"old" and _hidden(tmp_path) == []
    file_system.write_file(path, lambda file: file.write(b"new"), unique="3")
    assert path.read_bytes() == b"new"


def test_names_are_exchanged_in_one_step(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not file_system.exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("the file system cannot")
    assert (tmp_path / "a" / "b").exists() and (tmp_path / "b" / "a").exists()
    with pytest.raises(FileNotFoundError):
        file_system.exchange(tmp_path / "a", tmp_path / "c")
