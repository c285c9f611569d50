"""Reports a run that fails: briefly on the terminal, and with all stacks in a file.

Every rank appends its traceback to a file of the host. One of them prints: the rank that failed
or, if that cannot print, the first other one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
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
#: Names of files beside; ``smp run`` has the same.
GIVEN_UP_FILE, TAKEN_FILE, STOPPABLE_FILE = "given_up", "taken", "stoppable"
_TORCHRUN_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_MAX_FRAMES = 4  # frames of the traceback, two lines each
_FIRST_LINES, _LAST_LINES = 5, 3  # lines of a message
_MAX_CHARACTERS = 400  # characters of a line
_SHOWN = "==== shown on the terminal"
_WAIT_S = 3.0  # time for the failed rank to print
_OLD_S = 7 * 24 * 3600.0
_OURS = tuple(os.path.dirname(os.path.realpath(m.__file__ or "")) for m in (_C, torch))
_RULE = "+" + "-" * 78

#: Advice by kind of failure, for ranks that cannot give advice themselves.
_ADVICE = {
    "died": "read its last lines, and `dmesg`: the system kills processes if memory runs out",
    "unreachable": "check that host, and the network between the hosts",
    "left": "give all ranks the same number of steps, or train in `with model.join():`",
    "deadlock": "make the same collective calls on all ranks, in the same order",
    "stuck": "read its stack; raise SMP_HANG_S if it was only busy",
}


@dataclass(frozen=True)
class Culprit:
    """The rank that ended the run, as seen by this rank.

    Attributes:
        rank: global rank; None if it is not known, or if all ranks wait.
        words: number and place, for people.
        kind: kind of failure; "raised" also for this rank's own exception.
        where: module and microbatch, if known.
        is_other: whether this rank failed because of another one.
        is_near: whether that rank is a process of this host.
        described: number and place in the form that messages of the core have.
    """

    rank: int | None
    words: str
    kind: str = "raised"
    where: str = ""
    is_other: bool = False
    is_near: bool = True
    described: str = ""


class FailureFile:
    """The file with stacks of the ranks of one run on this host; writes are whole sections."""

    def __init__(self, identity: str) -> None:
        """
        Args:
            identity: text that is the same on the ranks of this run and on no others.
        """
        self.path = file_of(identity)
        self._since = time.time()
        self._pid = os.getpid()

    @property
    def is_own_process(self) -> bool:
        """True if this is the process that made the object, and not a forked child."""
        return os.getpid() == self._pid

    def open(self) -> None:
        """Makes the folder, and directs the details of the core to the same file.

        If the folder cannot be made, or is another user's, everything is printed.
        """
        try:
            make_private(str(self.path.parent))
            for old in self.path.parent.glob("errors-*.txt"):
                # Another process that starts may remove the same file meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    if old.stat().st_mtime < self._since - _OLD_S:
                        old.unlink()
        except (OSError, RuntimeError):
            self.path = Path(os.devnull, "errors")  # cannot be opened
        else:
            _C.set_details_file(str(self.path))

    def append(self, text: str) -> bool:
        """Adds a section; returns False if the file cannot be written."""
        try:
            with self.path.open("a", encoding="utf-8", errors="replace") as file:
                header = f"==== {_C.rank_prefix()}process {os.getpid()}"
                file.write(f"{header}\n{text.rstrip()}\n")
            return True
        except OSError:
            return False

    def claim(self) -> bool:
        """Returns whether this process has to print: the first caller of this run does."""
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
        """Returns whether some process has printed."""
        try:
            return self._is_shown(self.path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return False

    def _is_shown(self, text: str) -> bool:
        # Marks of an earlier run with the same identity do not count.
        marks = [line for line in text.splitlines() if line.startswith(_SHOWN)]
        return any(float(mark.rpartition(" ")[2]) >= self._since for mark in marks)


def file_of(identity: str) -> Path:
    """Returns the path of the file of a run on this host; hosts may share the folder."""
    digest = hashlib.sha256(f"{identity} on {socket.gethostname()}".encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir(), f"smp-{os.getuid()}", f"errors-{digest}.txt")


def show(error: BaseException, culprit: Culprit, file: FailureFile) -> None:
    """Writes the stack of this rank to the file, and prints a report if no other rank does.

    Under ``smp run`` the report is passed to the launcher, which prints it when all ranks have
    ended. Torchrun receives it for its own summary.

    Args:
        error: uncaught exception.
        culprit: rank that caused the exception.
        file: failure file of the run.
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
        error: uncaught exception.
        culprit: rank that caused the exception.
        path: path of the file with all stacks; empty: there is none.
    """
    message = message_of(error)
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


def message_of(error: BaseException) -> list[str]:
    """Returns the lines of an exception, without the frames that pybind11 appends."""
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
    """Returns the frames of a traceback without those of smp and torch."""
    frames = traceback.extract_tb(trace)
    return [f for f in frames if not _is_ours(f.filename) and not f.filename.startswith("<frozen")]


def _is_ours(filename: str) -> bool:
    return os.path.realpath(filename).startswith(tuple(folder + os.sep for folder in _OURS))


def _remedy(error: BaseException, message: Sequence[str]) -> str:
    """Returns the advice in a message of smp (its last clause), or where to look."""
    if isinstance(error, KeyboardInterrupt):
        return "nothing: it was interrupted (Ctrl-C)"
    if isinstance(error, torch.OutOfMemoryError):
        return "use less memory: the message has settings; docs/troubleshooting.md#out-of-memory"
    frames = traceback.extract_tb(error.__traceback__)
    is_ours = not frames or _is_ours(frames[-1].filename)
    clause = message[0].rpartition("; ")[2] if "; " in message[0] else ""
    if is_ours and clause:
        return clause
    return "correct the error of the traceback, which ended the other ranks as well"


def write_failure(
    path: str, culprit: int | None, error: BaseException, lines: Sequence[str]
) -> bool:
    """Writes the culprit for the launcher: rank 0 may end first because rank 1 has failed.

    Args:
        path: path of the file.
        culprit: global rank, if it is known.
        error: exception that ends this process.
        lines: report that the launcher prints if the culprit itself has left none.

    Returns:
        whether the file was written.
    """
    told = {"culprit": culprit, "error": type(error).__name__, "report": list(lines)}
    try:
        Path(path).write_text(json.dumps(told), encoding="utf-8")
        return True
    except OSError as problem:
        print(f"smp: cannot write {path}: {problem.strerror}", file=sys.stderr)
        return False


def note_given_up(launched: Sequence[int]) -> None:
    """Notes ranks without which the others go on, for the launcher.

    Args:
        launched: numbers that the launcher has given to these ranks.
    """
    _note(GIVEN_UP_FILE, launched)


def note_taken(number: int) -> None:
    """Notes, for the launcher, that this process has the place of a lost rank.

    Args:
        number: number that the launcher has given to it.
    """
    _note(TAKEN_FILE, [number])


def note_stoppable(number: int) -> None:
    """Notes, for the launcher, that SIGTERM to this process makes all ranks save and stop.

    Args:
        number: number that the launcher has given to it.
    """
    _note(STOPPABLE_FILE, [number])


def _note(name: str, numbers: Sequence[int]) -> None:
    path = os.environ.get(FAILURE_VARIABLE)
    if path:
        with (Path(path).parent / name).open("a", encoding="ascii") as file:
            file.write("".join(f"{number}\n" for number in numbers))


def _tell_torchrun(lines: Sequence[str], culprit: Culprit) -> None:
    """Writes the box for torchrun, which takes the earliest one as the root cause."""
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
        pass  # torchrun's summary lacks the report


def is_plain(hook: Callable[..., object]) -> bool:
    """Returns whether a hook for exceptions only prints: the hook of Python or of torch."""
    module = getattr(hook, "__module__", None)
    return hook is sys.__excepthook__ or module == "torch.distributed.distributed_c10d"
