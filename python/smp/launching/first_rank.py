"""Implements ``smp.launch``."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import Any

import torch
from smp_cli.cores import usable_cores
from smp_cli.environment import Share, free_port, without_foreign
from smp_cli.supervisor import find_failure

import smp._C as _C
from smp.launching.others import Others, interrupt, interruptible, whole_lines
from smp.world import runtime
from smp.world.launch import read_launch

LAUNCHED_VARIABLE = "SMP_LAUNCHED"
WHAT = "smp.launch"

_GRACE_S = 10.0  # for ranks to end by themselves after the first one has failed
_WHO = "| who "  # start of the line of a report that names the rank and its error
_INTERRUPTED_S = 3.0  # the same, after an interrupt
_FUNCTION_FILE = "main.pickle"

_num_launches = 0


def launch(main: Callable[..., Any], n: int, *args: Any) -> Any:
    """Runs a function on `n` ranks of this machine, without a launcher.

    This process is rank 0, and the others are started and ended by this call. Their output appears
    here with the rank in front. In a script that ``python`` runs, they are processes of the same
    script: they run it as far as this call, and end after it. A script calls this once. In a
    notebook or an interactive interpreter they get the function with the package cloudpickle, and
    the call may be repeated.

    The function begins with `smp.init` or `smp.auto`; `smp.shutdown` follows by itself. Ctrl-C, or
    the interrupt of a notebook, ends all ranks. Under a launcher (``smp run``, ``torchrun``) that
    has started `n` ranks, the function just runs.

    Args:
        main: the function.
        n: number of ranks.
        args: arguments of the function.

    Returns:
        the result of rank 0.

    Raises:
        ValueError: `n` is no number above 0, or not that of the launcher.
        RuntimeError: another rank failed: the text has its report, and this process goes on. Or
            smp is initialized already, or a script calls this a second time.
    """
    if type(n) is not int or n < 1:
        raise ValueError(f"{WHAT}: n: expected a whole number above 0, got {n!r}")
    if not callable(main):
        raise ValueError(f"{WHAT}: main: expected a function, got {type(main).__name__}")
    if runtime.is_initialized():
        raise RuntimeError(
            f"{_C.rank_prefix()}{WHAT} starts ranks, and smp is initialized in this process; call "
            "smp.init or smp.auto in the function that it runs (smp.shutdown() ends what runs)"
        )
    started = read_launch(os.environ, "")
    if started.world_size > 1 or os.environ.get(LAUNCHED_VARIABLE):
        return _run_here(main, n, args, started.launcher, started.world_size)
    is_script = _is_script()
    _count_launch(is_script)
    there = tempfile.TemporaryDirectory(prefix="smp-launch-", ignore_cleanup_errors=True)
    with there as folder, whole_lines(), interruptible():
        meeting = Path(folder)
        if is_script:
            return _run_all(partial(main, *args), n, _command_of_script(), meeting)
        command = _command_of_function(main, args, meeting)
        # Variables of the kernel's context are not set, as they are not on other ranks.
        return _run_all(partial(Context().run, main, *args), n, command, meeting)


def _run_here(
    main: Callable[..., Any], n: int, args: Sequence[Any], launcher: str, world_size: int
) -> Any:
    """Runs the function as one of the ranks that a launcher, or another process, has started."""
    if world_size != n:
        raise ValueError(
            f"{WHAT}: n={n}, and the launcher {launcher!r} has started {world_size} ranks; start "
            f"the script with python alone, or {n} ranks"
        )
    result = main(*args)
    if os.environ.get(LAUNCHED_VARIABLE):
        runtime.shutdown()
        raise SystemExit(0)  # the rest of the script is for the first rank
    return result


def _is_script() -> bool:
    """Returns whether the main module is a file that other processes can run."""
    return getattr(sys.modules.get("__main__"), "__file__", None) is not None


def _count_launch(is_script: bool) -> None:
    global _num_launches
    _num_launches += 1
    if is_script and _num_launches > 1:
        raise RuntimeError(
            f"{WHAT} was called a second time in one script, whose other ranks run the script as "
            "far as the first call; put both runs into one function"
        )


def _command_of_script() -> list[str]:
    return [sys.executable, *sys.orig_argv[1:]]


def _command_of_function(main: Callable[..., Any], args: Sequence[Any], folder: Path) -> list[str]:
    """Writes a function to a file, and returns the command that runs it.

    Raises:
        RuntimeError: the package for that is missing, or the function refers to something that
            cannot be sent.
    """
    try:
        pickler = importlib.import_module("cloudpickle")
    except ImportError:
        raise RuntimeError(
            f"{WHAT}: functions of a notebook are sent with the package cloudpickle, which is not "
            "installed; install it, or put the code into a script"
        ) from None
    path = folder / _FUNCTION_FILE
    try:
        path.write_bytes(pickler.dumps((list(sys.path), main, tuple(args))))
    except Exception as error:  # objects raise what they like
        raise RuntimeError(
            f"{WHAT}: {getattr(main, '__name__', main)!r} refers to something that cannot be sent "
            f"to other processes ({type(error).__name__}: {error}); make it inside of the function"
        ) from error
    return [sys.executable, "-m", "smp.launching.rank", str(path)]


def _run_all(main: Callable[[], Any], n: int, command: list[str], meeting: Path) -> Any:
    """Runs the function here and in other processes, and ends these."""
    base = {
        **without_foreign(os.environ),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        "SMP_RENDEZVOUS": f"file://{meeting}/rendezvous",
        LAUNCHED_VARIABLE: "1",
    }
    share = Share(command, base, n, n)
    caller = threading.current_thread()
    others = Others(share, meeting, on_failure=partial(interrupt, caller))
    try:
        with _as_rank(share.environment_of(0, 0, meeting), n):
            others.start(0)
            result = main()
            runtime.shutdown()
    except BaseException as error:
        _leave(error)
        is_ours = isinstance(error, KeyboardInterrupt) and not others.has_failed
        others.finish(_INTERRUPTED_S if is_ours else _GRACE_S)
        _raise_for(others, meeting, error, is_ours)
        raise
    others.finish(None)
    _raise_for(others, meeting, None, False)
    return result


@contextmanager
def _as_rank(env: Mapping[str, str], n: int) -> Iterator[None]:
    """Gives this process the variables and threads of a rank, and takes them back."""
    before, num_threads = dict(os.environ), torch.get_num_threads()
    own = {key: value for key, value in env.items() if key.startswith(("SMP_", "MASTER_"))}
    own.pop(LAUNCHED_VARIABLE)
    os.environ.update(own)
    if "OMP_NUM_THREADS" not in before:
        torch.set_num_threads(max(1, usable_cores() // n))
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        for key in own:
            os.environ.pop(key, None)
            if key in before:
                os.environ[key] = before[key]


def _leave(error: BaseException) -> None:
    """Ends smp in this process after an error, so that the other ranks end as well."""
    if runtime.is_initialized():
        runtime.current().rank.report_raised("the function of smp.launch", error)
        runtime.shutdown()


def _raise_for(
    others: Others, meeting: Path, error: BaseException | None, is_interrupted: bool
) -> None:
    """Raises the failure of another rank, if that is why the job has ended.

    Raises:
        RuntimeError: another rank has failed.
    """
    is_victim = error is None or isinstance(error, _C.PeerFailure | KeyboardInterrupt)
    failure = find_failure(others.ended, meeting)
    if failure is not None and is_victim and not is_interrupted:
        # A terminal shows the first lines of a long text.
        who = [line.removeprefix(_WHO).strip() for line in failure.report if line.startswith(_WHO)]
        first = ": ".join([WHAT, failure.words, *who[:1]])
        raise RuntimeError("\n".join([first, *failure.report])) from error
