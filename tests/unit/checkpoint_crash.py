"""Saves checkpoints in processes that are killed, and looks at what is left. Imports no torch.

Run by ``test_checkpoint_folder.py`` as a program of its own, ``checkpoint_crash.py FOLDER MODE
COUNT SEED``. MODE ``random`` kills at COUNT random moments, ``everywhere`` before every file
operation of a save (at most COUNT), ``aside`` the same where names cannot be exchanged, ``whole``
the same while a file is saved with what belongs to it. Prints counts in JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
import types
import zlib
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

from smp.checkpoint import file_generation as files  # noqa: E402
from smp.checkpoint import file_system, folder  # noqa: E402
from smp.checkpoint import manifest as manifests  # noqa: E402
from smp.checkpoint.manifest import Layout, Manifest, Piece, record_of  # noqa: E402

_NUM_RANKS = 2
_KEEP = 2


def save(path: Path, number: int) -> None:
    """Saves a checkpoint; names come again, so that folders are replaced, too."""
    generation = f"{number}-{os.getpid()}"
    name = f"step{number % 3}_partial"
    first = folder.Generation.begin(path, name, generation)
    for rank in range(_NUM_RANKS):
        mine = first if rank == 0 else folder.Generation.join(path, name, generation)
        piece = Piece(values={"number": number})
        for kind in ("model", "optimizer"):
            file = f"{kind}_{rank}.pt"
            content = bytes([number % 256]) * (1000 + 70000 * rank)
            (mine.folder / file).write_bytes(content)
            piece.files[file] = record_of(mine.folder / file, 10000)
        mine.part_done(rank, piece.to_json())
    parts = first.parts(range(_NUM_RANKS))
    assert parts is not None
    pieces = [Piece.from_json(part, f"part {rank}") for rank, part in enumerate(parts)]
    first.commit(Manifest.assemble(generation, {}, Layout({}, {"pp": 1}), pieces), keep=_KEEP)
    assert folder.Generation(path, name, generation, None).committed()


def check(path: Path) -> int:
    """Checks that all visible checkpoints are complete, and returns the newest one's number."""
    found = folder.partial_checkpoints(path)
    for checkpoint in found:
        _load(checkpoint)
    if not (path / folder.NEWEST).exists():
        return -1
    return _load(folder.find(path, None))


def save_whole(path: Path, number: int) -> None:
    """Saves a file with its content and a file alone, as ``smp.save`` does; replaces older ones."""
    writing = files.FileGeneration.begin(path, "full.pt", f"{number}-{os.getpid()}")
    writing.temporary.write_bytes(str(number).encode() * 10000)
    unique = writing.generation
    file_system.write_file(writing.content, str(number).encode() * 10, unique)
    if not (path / "config.json").exists():
        file_system.write_file(path / "config.json", b"{}", unique)
    writing.commit()
    files.write_alone(path / "alone.pt", lambda file: file.write(str(number).encode() * 10000))


def check_whole(path: Path) -> int:
    """Checks that all is complete, and the content fits the file; returns the file's number."""
    if not (path / "full.pt").exists():
        assert files.content_of(path / "full.pt") is None
        return -1
    content = files.content_of(path / "full.pt")
    assert content is not None
    found = content.read_bytes()
    number = int(found[: len(found) // 10])
    assert found == str(number).encode() * 10
    assert (path / "full.pt").read_bytes() == str(number).encode() * 10000
    assert (path / "config.json").read_bytes() == b"{}"
    if (path / folder.NEWEST).exists():
        assert folder.newest_whole(path) == path / "full.pt"
    if (path / "alone.pt").exists():
        alone = (path / "alone.pt").read_bytes()
        assert alone == alone[: len(alone) // 10000] * 10000
    return number


def _load(checkpoint: Path) -> int:
    manifest = manifests.read(checkpoint)
    number: int = manifest.values["number"]
    assert len(manifest.files) == 2 * _NUM_RANKS
    for name, record in manifest.files.items():
        content = (checkpoint / name).read_bytes()
        assert set(content) == {number % 256} and len(content) == record.num_bytes, name
        chunks = [content[i : i + 10000] for i in range(0, len(content), 10000)]
        assert tuple(zlib.crc32(chunk) for chunk in chunks) == record.crc32
    return number


Form = tuple[Callable[[Path, int], None], Callable[[Path], int]]
PARTIAL: Form = (save, check)
WHOLE: Form = (save_whole, check_whole)


def left_over(path: Path) -> list[str]:
    return sorted(p.name for p in path.rglob("*") if p.name.startswith("."))


def in_child(body: Any) -> int:
    """Runs ``body`` in a forked process; its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException as error:  # the parent sees the status
            print(f"child: {error!r}", file=sys.stderr)
            os._exit(3)
        os._exit(0)
    return pid


def kill_at_random(path: Path, count: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    seconds = []
    for start in range(3):
        begin = time.monotonic()
        save(path, start)
        seconds.append(time.monotonic() - begin)
    start = 3

    def save_forever() -> None:
        for number in itertools.count(start):
            save(path, number)

    for _ in range(count):
        pid = in_child(save_forever)
        time.sleep(random.random() * 2.5 * max(seconds))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), status
        _look(path, counts)
        start = check(path) + 1
    counts["saved"] = start
    return counts


def kill_everywhere(path: Path, limit: int, form: Form) -> Counter[str]:
    """Kills a save before its first, second, ... file operation, until one survives."""
    save, check = form
    counts: Counter[str] = Counter()
    if form is not WHOLE:  # else the first files are of these, too
        for number in range(3):
            save(path, number)
    for operation in itertools.count(1):
        number = 3 + operation
        pid = in_child(lambda n=number, o=operation: _save_until(save, path, n, o))
        _, status = os.waitpid(pid, 0)
        newest = check(path)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0 and newest == number
            counts["operations"] = operation - 1
            return counts
        assert newest in (number, *range(-1, number)), newest
        counts["committed before death" if newest == number else "not committed"] += 1
        _look(path, counts)
        assert operation < limit, "a save has more file operations than expected"
    raise AssertionError


def _save_until(save: Callable[[Path, int], None], path: Path, number: int, operation: int) -> None:
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event.startswith(("open", "os.", "shutil.", "ctypes.dlsym")):
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    save(path, number)


def _look(path: Path, counts: Counter[str]) -> None:
    counts["deaths"] += 1
    counts["deaths that left something"] += bool(left_over(path))


def main() -> None:
    path, mode, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    random.seed(int(sys.argv[4]))
    if mode == "aside":
        file_system.exchange = lambda first, second: False  # type: ignore[assignment]
    form = WHOLE if mode == "whole" else PARTIAL
    save, check = form
    if mode == "random":
        counts = kill_at_random(path, count)
    else:
        counts = kill_everywhere(path, count, form)
    save(path, 1000)
    assert check(path) == 1000
    names = sorted(p.name for p in path.iterdir())
    assert left_over(path) == [], left_over(path)
    if form is WHOLE:
        assert names == ["alone.pt", "config.json", "full.pt", "newest", "user_content_full.pt"]
    else:
        assert len(names) == _KEEP + 1, names  # and `newest`
    assert "torch" not in sys.modules
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
