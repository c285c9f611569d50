"""What a terminal shows of a run that fails: one short report, and a file with all stacks.

Every rank appends its traceback to a file of the host. One of them prints: the rank that failed,
or, where that cannot, the first one that comes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

import smp._C as _C
from smp.world.rendezvous import make_private

FAILURE_VARIABLE = "SMP_FAILURE_FILE"
_TORCHRUN_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_MAX_FRAMES = 4  # of two lines each
_FIRST_LINES, _LAST_LINES = 5, 3  # of a message
_MAX_CHARACTERS = 400  # of a line
_SHOWN = "==== shown on the terminal"
_WAIT_S = 3.0  # for the rank that failed to print
_OLD_S = 7 * 24 * 3600.0
_OURS = tuple(os.path.dirname(os.path.realpath(m.__file__ or "")) for m in (_C, torch))
_RULE = "+" + "-" * 78

#: What to do by how a rank failed that cannot say so itself.
_ADVICE = {
    "died": "look at its last lines, and in `dmesg`: the system kills a process for want of memory",
    "unreachable": "look at that host, and at the network between the hosts",
    "left": "give all ranks equally many steps, or train in `with model.join():`",
    "deadlock": "make the same collective calls on all ranks, in one order",
    "stuck": "look at its stack; raise SMP_HANG_S if it was only busy",
}


@dataclass(frozen=True)
class Culprit:
    """The rank that ended the run, as this rank knows it.

    Attributes:
        rank: its number; None where it is not known, or where all of them wait.
        words: number and place, for people.
        kind: how it failed; "raised" also for this rank's own exception.
        where: module and microbatch, where known.
        is_other: this rank failed because of another one.
        is_near: it is a process of this host.
        described: number and place as messages of the core have them.
    """

    rank: int | None
    words: str
    kind: str = "raised"
    where: str = ""
    is_other: bool = False
    is_near: bool = True
    described: str = ""


class FailureFile:
    """Stacks of the ranks of one run on this host. Each process writes whole sections."""

    def __init__(self, identity: str) -> None:
        """
        Args:
            identity: text that the ranks of this run, and no others, have in common.
        """
        self.path = file_of(identity)
        self._since = time.time()
        self._pid = os.getpid()

    @property
    def is_own_process(self) -> bool:
        """False in a forked child, which is no rank."""
        return os.getpid() == self._pid

    def open(self) -> None:
        """Makes the folder; the core's own details go to the same file.

        Where the folder cannot be made, or is another user's, the terminal gets all.
        """
        try:
            make_private(str(self.path.parent))
            for old in self.path.parent.glob("errors-*.txt"):
                if old.stat().st_mtime < self._since - _OLD_S:
                    old.unlink(missing_ok=True)
        except (OSError, RuntimeError):
            self.path = Path(os.devnull, "errors")  # cannot be opened
        else:
            _C.set_details_file(str(self.path))

    def append(self, text: str) -> bool:
        """Adds a section; False where the file cannot be written."""
        try:
            with self.path.open("a", encoding="utf-8", errors="replace") as file:
                header = f"==== {_C.rank_prefix()}process {os.getpid()}"
                file.write(f"{header}\n{text.rstrip()}\n")
            return True
        except OSError:
            return False

    def claim(self) -> bool:
        """Returns whether this process is the one that prints: the first that asks in this run."""
        try:
            with self.path.open("a+", encoding="utf-8", errors="replace") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                if self._is_shown(file.read()):
                    return False
                file.write(f"{_SHOWN} {time.time()}\n")
                return True
        except OSError:
            return True

    def is_shown(self) -> bool:
        """Whether some process has printed."""
        try:
            return self._is_shown(self.path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return False

    def _is_shown(self, text: str) -> bool:
        # Not by an earlier run that met at the same place.
        marks = [line for line in text.splitlines() if line.startswith(_SHOWN)]
        return any(float(mark.rpartition(" ")[2]) >= self._since for mark in marks)


def file_of(identity: str) -> Path:
    """Path of the file of a run."""
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir(), f"smp-{os.getuid()}", f"errors-{digest}.txt")


def show(error: BaseException, culprit: Culprit, file: FailureFile) -> None:
    """Writes the stack of this rank to the file, and prints a report if that is for this rank.

    Under ``smp run`` the launcher prints it, when all ranks have ended. Torchrun gets it for its
    own summary.

    Args:
        error: uncaught.
        culprit: whom it is due to.
        file: of the run.
    """
    stack = "".join(traceback.format_exception(error))
    lines = report(error, culprit, str(file.path) if file.append(stack) else "")
    if path := os.environ.get(FAILURE_VARIABLE):
        if write_failure(path, culprit.rank, error, lines):
            return
    _tell_torchrun(lines, culprit)
    deadline = time.monotonic() + _WAIT_S
    if culprit.is_other and culprit.is_near and culprit.kind == "raised":
        while not file.is_shown() and time.monotonic() < deadline:
            time.sleep(0.02)
    if file.claim():
        print("\n".join(lines), file=sys.__stderr__ or sys.stderr, flush=True)


def report(error: BaseException, culprit: Culprit, path: str) -> list[str]:
    """Returns a short traceback and a box of three lines: who, where, and what to do.

    Args:
        error: uncaught.
        culprit: whom it is due to.
        path: of the file with all stacks; empty: there is none.
    """
    message = _message(error)
    frames = _frames(error.__traceback__)
    lines = []
    if not culprit.is_other:
        lines.append(f"Traceback of {culprit.words}, frames of smp and torch left out:")
        for frame in frames[-_MAX_FRAMES:]:
            lines.append(f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}')
            lines += [f"    {frame.line}"] * bool(frame.line)
    lines += _shortened(message, path)
    place = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "the script"
    first = message[0].replace(_C.rank_prefix(), "", 1)
    first = first.replace(culprit.described, culprit.words) if culprit.described else first
    if culprit.is_other:
        who, where = first, f"noticed at {place}"
    else:
        who = f"{culprit.words}: {first}"
        where = place + (f" ({culprit.where})" if culprit.where else "")
    advice = _ADVICE.get(culprit.kind) or _remedy(error, message)
    stacks = f"; stacks of all ranks: {path}" if path else ""
    box = [f"| who    {who}", f"| where  {where}", f"| do     {advice}{stacks}"]
    return [*lines, _RULE, *(_cut(line) for line in box), _RULE]


def _message(error: BaseException) -> list[str]:
    """Lines of an exception without frames, which pybind11 appends."""
    text = "".join(traceback.format_exception_only(error)).partition("\n\nAt:\n")[0]
    lines = text.removeprefix("smp._C.PeerFailure: ").strip().splitlines()
    return [line for line in lines if line.strip()] or [type(error).__name__]


def _shortened(lines: Sequence[str], path: str) -> list[str]:
    num_left_out = len(lines) - _FIRST_LINES - _LAST_LINES
    if num_left_out <= 1:
        return [_cut(line) for line in lines]
    more = f"... {num_left_out} lines more" + (f" in {path}" if path else "")
    kept = [*lines[:_FIRST_LINES], more, *lines[-_LAST_LINES:]]
    return [_cut(line) for line in kept]


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_CHARACTERS else line[: _MAX_CHARACTERS - 4] + " ..."


def _frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    """Frames of the script and of what it calls, but those of smp and torch."""
    frames = traceback.extract_tb(trace)
    return [f for f in frames if not _is_ours(f.filename) and not f.filename.startswith("<frozen")]


def _is_ours(filename: str) -> bool:
    return os.path.realpath(filename).startswith(tuple(folder + os.sep for folder in _OURS))


def _remedy(error: BaseException, message: Sequence[str]) -> str:
    """What a message of smp advises, which is its last clause; else where to look."""
    if isinstance(error, KeyboardInterrupt):
        return "nothing: it was interrupted (Ctrl-C)"
    if isinstance(error, torch.OutOfMemoryError):
        return "use less memory: the message has settings; docs/troubleshooting.md#out-of-memory"
    frames = traceback.extract_tb(error.__traceback__)
    is_ours = not frames or _is_ours(frames[-1].filename)
    clause = message[0].rpartition("; ")[2] if "; " in message[0] else ""
    if is_ours and clause:
        return clause
    return "mend what the traceback shows, because of which the other ranks ended"


def write_failure(
    path: str, culprit: int | None, error: BaseException, lines: Sequence[str]
) -> bool:
    """Tells the launcher the culprit: rank 0 may end first because rank 1 has failed.

    Args:
        path: of the file.
        culprit: global rank, if it is known.
        error: that ends this process.
        lines: what the launcher prints if the culprit itself cannot say it.

    Returns:
        whether it is written.
    """
    told = {"culprit": culprit, "error": type(error).__name__, "report": list(lines)}
    try:
        Path(path).write_text(json.dumps(told), encoding="utf-8")
        return True
    except OSError as problem:
        print(f"smp: cannot write {path}: {problem.strerror}", file=sys.stderr)
        return False


def _tell_torchrun(lines: Sequence[str], culprit: Culprit) -> None:
    """Writes the box where torchrun looks for it; the earliest is its root cause."""
    path = os.environ.get(_TORCHRUN_VARIABLE)
    if not path or os.path.exists(path):
        return
    told = {
        "message": "\n".join(lines[-4:-1]),
        "extraInfo": {"timestamp": str(int(time.time()) + culprit.is_other)},
    }
    try:
        Path(path).write_text(json.dumps({"message": told}), encoding="utf-8")
    except OSError:
        pass  # its summary is poorer


def is_plain(hook: Callable[..., object]) -> bool:
    """Whether a hook for exceptions does nothing but print: that of Python or of torch."""
    module = getattr(hook, "__module__", None)
    return hook is sys.__excepthook__ or module == "torch.distributed.distributed_c10d"
