"""Sends checkpoints to a store in processes that are killed, and looks at what loads. No torch.

Run by ``test_store_crash.py`` as a program of its own, ``store_crash.py FOLDER ADDRESS MODE COUNT
SEED``. MODE ``everywhere`` kills a job before one operation (of files, and before and after each
request to S3), the next one COUNT operations later and so on until one survives; ``random`` at
COUNT random moments. Each job begins with what the one before it left. Prints counts in JSON.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SMP = Path(__file__).resolve().parents[2] / "python" / "smp"
for _name, _folder in (("smp", _SMP), ("smp.checkpoint", _SMP / "checkpoint")):
    # The packages without their __init__, which import torch.
    _package = types.ModuleType(_name)
    _package.__path__ = [str(_folder)]
    sys.modules[_name] = _package

from smp.checkpoint import folder  # noqa: E402
from smp.checkpoint import manifest as manifests  # noqa: E402
from smp.checkpoint.locks import OwnerLock  # noqa: E402
from smp.checkpoint.manifest import Layout, Manifest, Piece, record_of  # noqa: E402
from smp.checkpoint.store import (  # noqa: E402
    fetching,
    names,
    objects,
    pending,
    sending,
    uploader,
)
from smp.checkpoint.store.fetching import Fetched  # noqa: E402
from smp.checkpoint.store.names import Key  # noqa: E402
from smp.checkpoint.store.nodes import Node  # noqa: E402
from smp.checkpoint.store.objects import ObjectStore  # noqa: E402
from smp.checkpoint.store.uploader import Upload, Uploader  # noqa: E402

_NUM_RANKS = 2
_KEEP = 2
_MOST_OPERATIONS = 1000
_LARGE = 11 << 20  # several parts on S3
objects._PART_BYTES = 5 << 20
uploader._POLL_S = 0.01


def contents(number: int, is_s3: bool) -> dict[str, bytes]:
    """Files of the checkpoint with this number."""
    sizes = {"model_0.pt": 1000, "model_1.pt": 70_000, "optimizer_0.pt": 0, "rng_0.pt": 10}
    if is_s3:
        sizes["optimizer_0.pt"] = _LARGE
    return {name: bytes([number % 256, number // 256]) * (n // 2) for name, n in sizes.items()}


def job(root: Path, address: names.Address, number: int) -> None:
    """Continues pending uploads, saves one checkpoint, and waits for its end, as one job."""
    store, everyone = ObjectStore(address), tuple(range(_NUM_RANKS))
    ranks = [
        Uploader(store, Node(rank, everyone, (0,)), "", 30.0, lambda: None, set)
        for rank in everyone
    ]

    def send(key: Key, lock: OwnerLock) -> None:
        for rank, sender in enumerate(ranks):
            one = pending.Pending.of(root, key)
            sender.add(Upload(one, lock if rank == 0 else None, _KEEP))

    store.generations()
    root.mkdir(exist_ok=True)
    for one, lock in pending.left_by_the_dead(root):
        one.forget_failures()
        send(one.key, lock)
    key = Key(f"{number:024x}", f"step{number % 3}_partial")  # names come again
    locks: list[OwnerLock] = []
    save(root, key, number, address.protocol == "s3", lambda source: locks.append(
        pending.hold(root, source, key)[1]))  # fmt: skip
    send(key, locks[0])
    for sender in ranks:
        assert sender.wait(60)
        sender.stop()


def save(
    root: Path, key: Key, number: int, is_s3: bool, when_complete: Callable[[Path], None]
) -> None:
    """Complete in the folder."""
    generation = folder.Generation.begin(root, key.name, key.generation)
    piece = Piece(values={"number": number})
    for name, content in contents(number, is_s3).items():
        (generation.folder / name).write_bytes(content)
        piece.files[name] = record_of(generation.folder / name)
    manifest = Manifest.assemble(key.generation, {}, Layout({}, {"pp": 1}), [piece])
    generation.commit(manifest, keep=_KEEP, when_complete=when_complete)


def check(root: Path, address: names.Address) -> int:
    """Loads every complete generation on another machine, and returns the newest one's number."""
    store = ObjectStore(address)
    complete = [key for key in store.generations() if store.stored(key).is_complete]
    newest = -1
    for key in complete:
        fetched = Fetched(store, key, root.with_name("other"), 10.0)
        fetched.get_all()
        number = fetched.manifest.values["number"]
        expected = contents(number, address.protocol == "s3")
        found = {name: (fetched.folder / name).read_bytes() for name in fetched.manifest.files}
        assert found == expected and key.generation == f"{number:024x}", key
        fetched.close()
        newest = max(newest, number)
    fetching.tidy(root.with_name("other"), None)
    if (root / folder.NEWEST).exists():
        local = folder.find(root, None)
        number = manifests.read(local).values["number"]
        for name, content in contents(number, address.protocol == "s3").items():
            assert (local / name).read_bytes() == content
    return newest


def in_child(body: Callable[[], Any]) -> tuple[int, Any]:
    """Runs ``body`` in a forked process; its status and what it returned."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, json.dumps(body()).encode())
        except BaseException as error:  # the parent sees the status
            print(f"child: {error!r}", file=sys.stderr)
            os._exit(3)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        told = file.read()
    _, status = os.waitpid(pid, 0)
    return status, json.loads(told) if told else None


def count_operations(operation: int) -> None:
    """Kills this process before an operation of it."""
    seen, lock = itertools.count(1), threading.RLock()  # to kill is an operation, too

    def happened() -> None:
        with lock:
            if next(seen) == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(("open", "os.", "shutil.")):
            happened()

    if "s3fs" in sys.modules:
        cls = sys.modules["s3fs"].S3FileSystem
        real = cls._call_s3

        async def call(self: Any, *arguments: Any, **options: Any) -> Any:
            happened()
            result = await real(self, *arguments, **options)
            happened()
            return result

        cls._call_s3 = call
        cls.call_s3 = importlib.import_module("fsspec.asyn").sync_wrapper(call)
    else:
        sys.addaudithook(hook)


def killed_job(root: Path, address: names.Address, number: int, operation: int) -> None:
    count_operations(operation)
    job(root, address, number)


def look(root: Path, address: names.Address, newest: int, counts: Counter[str]) -> int:
    status, found = in_child(lambda: check(root, address))
    assert status == 0, "what is complete does not load"
    assert found >= newest, f"{found} is older than {newest}, which was complete"
    counts["deaths"] += 1
    counts["newer afterwards"] += found > newest
    left = root / pending.FOLDER
    counts["deaths that left something pending"] += left.is_dir() and any(left.iterdir())
    return int(found)


def kill_everywhere(root: Path, address: names.Address, stride: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    newest = -1
    begin = 1 + random.randrange(stride)
    for number, operation in enumerate(range(begin, _MOST_OPERATIONS, stride)):
        status, _ = in_child(lambda n=number, o=operation: killed_job(root, address, n, o))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, status
            counts["operations"] = operation - 1
            return counts
        newest = look(root, address, newest, counts)
    raise AssertionError("a job has more operations than expected")


def kill_at_random(root: Path, address: names.Address, count: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    begin = time.monotonic()
    status, _ = in_child(lambda: job(root, address, 0))
    seconds, newest = time.monotonic() - begin, 0
    assert status == 0
    for number in range(1, count + 1):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            job(root, address, number)
            os._exit(0)
        os.close(write)
        time.sleep(random.random() * seconds)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        newest = look(root, address, newest, counts)
    return counts


def finish(root: Path, address: names.Address) -> list[Any]:
    """Deletes old and dead generations; returns the numbers of kept ones and of ended uploads."""
    store = ObjectStore(address)
    keys = store.generations()
    sending.prune(store, max(keys), _KEEP, set(), quiet_s=-100.0)
    left = store.generations()
    assert all(store.stored(key).is_complete for key in left), left
    for key in left:
        found, manifest = store.stored(key).sizes, Fetched(store, key, root.with_name("last"), 9.0)
        assert set(found) == {*manifest.manifest.files, "manifest.json"}, found
    uploads = sum(store.end_uploads(key) for key in keys)
    return [len(left), uploads]


def main() -> None:
    root, address, mode = Path(sys.argv[1]), names.parse(sys.argv[2]), sys.argv[3]
    count = int(sys.argv[4])
    random.seed(int(sys.argv[5]))
    # Before processes fork, none of which has a thread of it then.
    importlib.import_module("fsspec.implementations.local")
    if address.protocol == "s3":
        importlib.import_module("s3fs")
    kill = kill_everywhere if mode == "everywhere" else kill_at_random
    counts = kill(root, address, count)
    status, _ = in_child(lambda: job(root, address, 10_000))
    assert status == 0
    status, newest = in_child(lambda: check(root, address))
    assert (status, newest) == (0, 10_000)
    assert sorted(path.name for path in (root / pending.FOLDER).iterdir()) == []
    status, left = in_child(lambda: finish(root, address))
    assert (status, left) == (0, [_KEEP, 0]), left
    assert "torch" not in sys.modules
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
