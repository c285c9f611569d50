"""Generations on their way into stores and out of them: files, memory, and a real S3 server."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from smp.checkpoint.folder import Generation
from smp.checkpoint.manifest import Layout, Manifest, ManifestError, Piece, record_of
from smp.checkpoint.store import fetching, names, objects, pending, plan, sending
from smp.checkpoint.store.fetching import Fetched
from smp.checkpoint.store.names import Key
from smp.checkpoint.store.objects import ObjectStore, Stopped
from smp.checkpoint.store.pending import Pending
from smp.checkpoint.store.sending import NotSent, Progress
from tests.unit import s3_server

KINDS = ["file", "memory", pytest.param("s3", marks=s3_server.NEEDED)]


@pytest.fixture
def address(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> names.Address:
    kind = request.param
    if kind == "s3":
        for name, value in request.getfixturevalue("s3").items():
            monkeypatch.setenv(name, value)
        return names.parse(f"s3://{s3_server.BUCKET}/{tmp_path.name}")
    return names.parse(f"file://{tmp_path}/store" if kind == "file" else f"memory://{tmp_path}")


def contents(number: int) -> dict[str, bytes]:
    return {f"f{i}.pt": bytes([number, i]) * (1000 * i) for i in range(5)}


def save(root: Path, number: int, name: str = "a_partial") -> tuple[Pending, Any]:
    """A complete checkpoint that is pending."""
    key = Key(f"{number:024x}", name)
    generation = Generation.begin(root, name, key.generation)
    piece = Piece()
    for file, content in contents(number).items():
        (generation.folder / file).write_bytes(content)
        piece.files[file] = record_of(generation.folder / file)
    manifest = Manifest.assemble(key.generation, {}, Layout({}, {"pp": 1}), [piece])
    generation.commit(manifest)
    return pending.hold(root, generation.target, key)


def send(store: ObjectStore, held: tuple[Pending, Any], num_ranks: int = 2) -> list[Progress]:
    shares = [Progress() for _ in range(num_ranks)]
    for rank, progress in enumerate(shares):
        sending.send_share(store, held[0], rank, num_ranks, progress)
    sending.complete(store, held[0], lambda: pytest.fail("all is there"), 10.0)
    held[0].delete()
    held[1].release(delete=True)
    return shares


def fetch(store: ObjectStore, key: Key, root: Path) -> dict[str, bytes]:
    fetched = Fetched(store, key, root, 10.0)
    fetched.get_all()
    found = {name: (fetched.folder / name).read_bytes() for name in fetched.manifest.files}
    fetched.close()
    return found


@pytest.mark.parametrize("address", KINDS, indirect=True)
def test_what_was_sent_is_fetched(address: names.Address, tmp_path: Path) -> None:
    store, root = ObjectStore(address), tmp_path / "local"
    assert store.generations() == []
    held = save(root, 1, "of a job #1_partial")
    shares = send(store, held)
    assert [len(share.sent) for share in shares] == [len(s) for s in plan.shares(
        {n: len(c) for n, c in contents(1).items()}, 2)]  # fmt: skip
    assert all(share.sent_bytes == share.total_bytes > 0 for share in shares)
    assert store.generations() == [held[0].key]
    found = store.stored(held[0].key)
    assert found.is_complete and abs(found.changed_s - os.stat(root).st_mtime) < 100
    assert fetch(store, held[0].key, tmp_path / "other") == contents(1)
    assert list((root / pending.FOLDER).iterdir()) == []


@pytest.mark.parametrize("address", KINDS, indirect=True)
def test_what_the_store_has_is_not_sent_again(address: names.Address, tmp_path: Path) -> None:
    store = ObjectStore(address)
    held = save(tmp_path / "local", 1)
    first = Progress()
    sending.send_share(store, held[0], 0, 2, first)
    with pytest.raises(NotSent, match="files of .* have not arrived within 0 s"):
        sending.complete(store, held[0], lambda: None, 0.0)
    assert not store.stored(held[0].key).is_complete
    # Another number of ranks goes on; an object that is too short is sent again.
    name = first.sent[0]
    (tmp_path / "short").write_bytes(b"x")
    store.put(held[0].key, name, tmp_path / "short")
    (again,) = send(store, held, num_ranks=1)
    assert sorted(again.skipped) == sorted(set(first.sent) - {name}) != []
    assert name in again.sent and set(again.sent) | set(again.skipped) == set(contents(1))
    assert fetch(store, held[0].key, tmp_path / "other") == contents(1)


@pytest.mark.parametrize("address", KINDS, indirect=True)
def test_old_generations_are_pruned(address: names.Address, tmp_path: Path) -> None:
    store, root = ObjectStore(address), tmp_path / "local"
    for number in (1, 2, 4):
        send(store, save(root, number))
    dead, _ = save(root, 3)
    sending.send_share(store, dead, 0, 2, Progress())
    done, read = Key(f"{4:024x}", "a_partial"), Key(f"{1:024x}", "a_partial")
    assert sending.prune(store, done, 1, {read}) == [Key(f"{2:024x}", "a_partial")]
    assert sending.prune(store, done, None, set(), quiet_s=-100.0) == [dead.key]
    assert store.generations() == [read, done]
    assert sending.prune(store, done, 1, set()) == [read]
    assert store.generations() == [done]
    assert fetch(store, done, tmp_path / "other") == contents(4)


def test_a_checkpoint_may_be_replaced_and_pruned_while_it_is_sent(tmp_path: Path) -> None:
    store, root = ObjectStore(names.parse(f"file://{tmp_path}/store")), tmp_path / "local"
    first = save(root, 1)
    sending.send_share(store, first[0], 0, 2, Progress())
    second = save(root, 2)  # of the same name
    send(store, first)
    assert fetch(store, first[0].key, tmp_path / "other") == contents(1)
    send(store, second)
    assert fetch(store, second[0].key, tmp_path / "other") == contents(2)


def test_a_rank_that_cannot_send_ends_the_generation(tmp_path: Path) -> None:
    store = ObjectStore(names.parse(f"file://{tmp_path}/store"))
    held, lock = save(tmp_path / "local", 1)
    held.say_failed(1, "no credentials")
    with pytest.raises(NotSent, match="global_rank 1: no credentials"):
        sending.complete(store, held, lambda: None, 10.0)
    held.forget_failures()
    assert held.failures() == {} and held.is_there()
    send(store, (held, lock))
    assert Pending.of(tmp_path / "local", held.key).failures() == {}
    held.say_failed(1, "too late")
    assert not held.is_there()


def test_a_file_is_tried_again_and_an_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore(names.parse(f"file://{tmp_path}/store"))
    held, _ = save(tmp_path / "local", 1)
    real, pauses, errors = store.put, [], [OSError("reset"), OSError("reset")]

    def put(*arguments: Any) -> None:
        if errors:
            raise errors.pop()
        real(*arguments)

    monkeypatch.setattr(store, "put", put)
    sending.send_share(store, held, 0, 1, Progress(), pauses.append)
    assert pauses == [1.0, 4.0]
    (tmp_path / "store" / held.key.folder() / "f3.pt").unlink()
    errors += [OSError("reset")] * 6
    with pytest.raises(NotSent, match="f3.pt could not be sent: OSError: reset"):
        sending.send_share(store, held, 0, 1, Progress(), pauses.append)
    errors[:] = [PermissionError("denied")]
    with pytest.raises(NotSent, match="f3.pt .*PermissionError: denied"):
        sending.send_share(store, held, 0, 1, Progress(), pytest.fail)


@pytest.mark.parametrize("address", ["file", KINDS[2]], indirect=True)
def test_a_transfer_that_is_stopped_leaves_nothing(
    address: names.Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large enough for several parts, stopped between two of them."""
    monkeypatch.setattr(objects, "_PART_BYTES", 5 << 20)
    seen: list[int] = []
    store = ObjectStore(address, lambda: bool(seen) or address.protocol == "file")
    key = Key("0" * 24, "a_partial")
    (tmp_path / "big").write_bytes(bytes(32 << 20))
    with pytest.raises(Stopped):
        store.put(key, "big.pt", tmp_path / "big", seen.append)
    assert dict(store.stored(key).sizes) == {}
    assert ObjectStore(address).end_uploads(key) == 0
    if address.protocol == "file":
        assert os.listdir(tmp_path / "store" / key.folder()) == []


@s3_server.NEEDED
@pytest.mark.parametrize("address", ["s3"], indirect=True)
def test_parts_of_dead_senders_are_given_up(
    address: names.Address, tmp_path: Path, s3: dict[str, str]
) -> None:
    store, client = ObjectStore(address), s3_server.client(s3)
    held = save(tmp_path / "local", 1)
    prefix = f"{tmp_path.name}/{held[0].key.folder()}/"
    for name in (f"{prefix}f1.pt", f"{tmp_path.name}/somebody_else"):
        made = client.create_multipart_upload(Bucket=s3_server.BUCKET, Key=name)
        client.upload_part(
            Bucket=s3_server.BUCKET, Key=name, UploadId=made["UploadId"], PartNumber=1, Body=b"x"
        )
    send(store, held)
    left = client.list_multipart_uploads(Bucket=s3_server.BUCKET)["Uploads"]
    assert [upload["Key"] for upload in left] == [f"{tmp_path.name}/somebody_else"]


# ---- what the dead leave


def test_the_next_job_finds_what_is_pending(tmp_path: Path) -> None:
    held, lock = save(tmp_path, 1)
    assert pending.left_by_the_dead(tmp_path) == [], "its owner lives"
    with pytest.raises(ValueError, match="sent by another process"):
        pending.hold(tmp_path, tmp_path / "a_partial", held.key)
    lock.release(delete=False)  # as the end of the process does
    second, other = save(tmp_path, 2)
    other.release(delete=False)
    linking = tmp_path / pending.FOLDER / f".linking-b_partial.{3:024x}"
    linking.mkdir()
    pending.lock_path(tmp_path, Key(f"{3:024x}", "b_partial")).touch()
    found = pending.left_by_the_dead(tmp_path)
    assert [one.key for one, _ in found] == [held.key, second.key]
    assert found[0][0].sizes() == {name: len(content) for name, content in contents(1).items()}
    assert pending.left_by_the_dead(tmp_path) == [], "they are ours now"
    assert not linking.exists()
    for one, taken in found:
        one.delete()
        taken.release(delete=True)
    assert os.listdir(tmp_path / pending.FOLDER) == []


# ---- fetching


def test_one_process_fetches_a_file_and_others_wait_for_it(tmp_path: Path) -> None:
    store = ObjectStore(names.parse(f"file://{tmp_path}/store"))
    held = save(tmp_path / "local", 1)
    send(store, held)
    readers = [Fetched(store, held[0].key, tmp_path / "other", 10.0) for _ in range(4)]
    threads = [threading.Thread(target=reader.get_all) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fetched = [name for reader in readers for name in reader.fetched]
    assert sorted(fetched) == sorted(contents(1)), "each once"
    folder = readers[0].folder
    assert sorted(os.listdir(folder)) == sorted([*contents(1), "manifest.json"])


def test_a_fetch_that_hangs_elsewhere_is_made_here(tmp_path: Path) -> None:
    store = ObjectStore(names.parse(f"file://{tmp_path}/store"))
    held = save(tmp_path / "local", 1)
    send(store, held)
    reader = Fetched(store, held[0].key, tmp_path / "other", 0.2)
    work = reader.folder.with_name(f"{reader.folder.name}.work")
    with open(work / "f1.pt.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (work / "f1.pt.12345678.fetching").write_bytes(b"half of")
        begin = time.monotonic()
        assert reader.get("f1.pt").read_bytes() == contents(1)["f1.pt"]
        assert time.monotonic() - begin >= 0.2
    assert (work / "f1.pt.12345678.fetching").read_bytes() == b"half of", "it may come to an end"


@pytest.mark.parametrize("address", KINDS, indirect=True)
def test_a_damaged_object_is_not_taken(address: names.Address, tmp_path: Path) -> None:
    store = ObjectStore(address)
    held = save(tmp_path / "local", 1)
    send(store, held)
    wrong = bytearray(contents(1)["f2.pt"])
    wrong[7] ^= 1
    (tmp_path / "wrong").write_bytes(wrong)
    store.put(held[0].key, "f2.pt", tmp_path / "wrong")
    reader = Fetched(store, held[0].key, tmp_path / "other", 10.0)
    with pytest.raises(ManifestError, match="f2.pt.* is damaged"):
        reader.get("f2.pt")
    assert os.listdir(reader.folder) == ["manifest.json"]
    sending.delete(store, held[0].key, store.stored(held[0].key).sizes)
    with pytest.raises(
        FileNotFoundError, match="f3.pt does not exist any more: the checkpoint was deleted"
    ):
        reader.get("f3.pt")


def test_what_is_read_is_not_deleted(tmp_path: Path) -> None:
    store = ObjectStore(names.parse(f"file://{tmp_path}/store"))
    for number in (1, 2, 3):
        send(store, save(tmp_path / "local", number))
    keys = store.generations()
    root = tmp_path / "other"
    readers = [Fetched(store, key, root, 10.0) for key in keys]
    for reader in readers:
        reader.get_all()
    readers[0].close()
    assert fetching.tidy(root, keys[2]) == [keys[0].folder()]
    assert readers[1].get("f3.pt").read_bytes() == contents(2)["f3.pt"]
    readers[1].close()
    readers[2].close()
    assert fetching.tidy(root, keys[2]) == [keys[1].folder()]
    assert fetching.tidy(root, None) == [keys[2].folder()]
    assert os.listdir(root / fetching.FOLDER) == []
    assert fetch(store, keys[0], root) == contents(1)


def test_a_store_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = objects.importlib.import_module

    def missing(name: str) -> Any:
        if name == "gcsfs":
            raise ImportError("No module named 'gcsfs'")
        return real(name)

    monkeypatch.setattr(objects.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"gs://bucket/x: the package gcsfs .* '[.]\[store\]'"):
        ObjectStore(names.parse("gs://bucket/x"))
