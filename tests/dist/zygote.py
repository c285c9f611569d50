"""The process from which all test processes are forked.

Importing torch, transformers and smp takes seconds of CPU time; eight ranks
that each do it keep two cores busy for half a minute. The zygote imports once
and forks in milliseconds. It never runs anything itself: no threads, no
process group, no CUDA.

Commands arrive on the pipe ``--commands`` and answers leave on ``--answers``,
pickled:

* ``("workers", count, address, folder)``: fork `count` resident workers that
  connect to `address` -> ``("started", pids)``
* ``("script", path, argv, env, output)``: fork a process which runs the file
  as ``__main__``, exactly like ``python path`` would -> ``("started", [pid])``
* whenever a child has ended -> ``("ended", pid, returncode, monotonic time)``

When the commands end (the test session is over or was killed), so do the
zygote and everything it forked.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
# Flags of `setns`: the network, the host name, mounts.
_NAMESPACES = {"net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}
HOST_VARIABLE = "TEST_HOST_PID"
"""A process whose namespaces a script runs in."""
MONOTONIC_VARIABLE = "TEST_MONOTONIC_S"
"""Seconds that CLOCK_MONOTONIC of a script is ahead."""
_CLONE_NEWTIME = 0x80
# Whatever a launcher or an earlier run may have left behind.
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SM_HP_MP_PARAMETERS",
    "SMP_RENDEZVOUS",
)


def die_with_parent() -> None:
    """Asks the kernel to end this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def preload() -> None:
    """Imports what tests need, in the order of a user's script."""
    import torch

    torch.set_num_threads(1)
    if importlib.util.find_spec("transformers"):  # else tests that import it say so
        import transformers
        from transformers import (  # noqa: F401  (the classes load their modules)
            BertForSequenceClassification,
            GPT2LMHeadModel,
            GPTJForCausalLM,
        )

        transformers.logging.set_verbosity_error()
    importlib.import_module("smp")
    importlib.import_module("torch._dynamo")  # takes 2 s, when the first optimizer is made
    for name in filter(None, os.environ.get("SMP_TEST_PRELOAD", "").split(",")):
        importlib.import_module(name)
    # The collector would walk through all modules when a child exits (seconds),
    # and copy every shared page by doing so.
    gc.collect()
    gc.freeze()


def redirect_output(path: str) -> None:
    """Sends stdout and stderr of this process to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout.reconfigure(line_buffering=True)


def enter_host(pid: str) -> None:
    """Moves this process, which has one thread yet, into the namespaces of another one."""
    for name, flag in _NAMESPACES.items():
        with open(f"/proc/{pid}/ns/{name}", "rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), flag) != 0:
                raise OSError(ctypes.get_errno(), f"setns to {name} of process {pid}")


def shift_monotonic(seconds: str) -> None:
    """Moves this process, which has one thread yet, into a time namespace of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWTIME) != 0:
        raise OSError(ctypes.get_errno(), "unshare of the time")
    Path("/proc/self/timens_offsets").write_text(f"monotonic {seconds} 0\n")
    with open("/proc/self/ns/time_for_children", "rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWTIME) != 0:
            raise OSError(ctypes.get_errno(), "setns to another time")


def load_substitutes() -> None:
    """Makes SMP_TEST_LANES and SMP_TEST_DELAYS count in this process, if one of them is set."""
    if os.environ.keys() & {"SMP_TEST_LANES", "SMP_TEST_DELAYS"}:
        importlib.import_module("smp_testing")


class Zygote:
    """Forks on command; a fork leaves `serve` with the job of the child."""

    def __init__(self, commands: Connection, answers: Connection) -> None:
        self._commands = commands
        self._answers = answers
        self._children: set[int] = set()

    def serve(self) -> Callable[[], None] | None:
        """Returns the job in a child, None in the zygote when it is over."""
        while True:
            # Ends of children are polled: a signal handler or a thread would
            # be inherited by every fork.
            try:
                has_command = self._commands.poll(0.01 if self._children else None)
                command = pickle.loads(self._commands.recv_bytes()) if has_command else None
            except (EOFError, OSError):
                return None
            if command is not None:
                job = self._start(command)
                if job is not None:
                    return job
            self._reap()

    def stop_children(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)  # ours and not reaped, so not reused
        for pid in self._children:
            os.waitpid(pid, 0)

    def _answer(self, *answer: Any) -> None:
        self._answers.send_bytes(pickle.dumps(answer))

    def _start(self, command: tuple[Any, ...]) -> Callable[[], None] | None:
        kind, *args = command
        jobs: list[Callable[[], None]]
        if kind == "workers":
            count, address, folder = args
            jobs = [Worker(i, address, Path(folder)).main for i in range(count)]
        else:
            jobs = [Script(*args).main]
        pids = []
        for job in jobs:
            pid = os.fork()
            if pid == 0:
                die_with_parent()
                self._commands.close()
                self._answers.close()
                return job
            pids.append(pid)
        self._children.update(pids)
        self._answer("started", pids)
        return None

    def _reap(self) -> None:
        for pid in list(self._children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._children.remove(pid)
                self._answer("ended", pid, os.waitstatus_to_exitcode(status), time.monotonic())


class Script:
    """A file run as ``__main__`` in a fresh process."""

    def __init__(self, path: str, argv: list[str], env: dict[str, str], output: str) -> None:
        self._path, self._argv, self._env, self._output = path, argv, env, output

    def main(self) -> None:
        for name in RANK_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(self._env)
        load_substitutes()
        redirect_output(self._output)
        if host_pid := os.environ.pop(HOST_VARIABLE, None):
            enter_host(host_pid)
        if seconds := os.environ.pop(MONOTONIC_VARIABLE, None):
            shift_monotonic(seconds)
        sys.argv = [self._path, *self._argv]
        runpy.run_path(self._path, run_name="__main__")


class Worker:
    """A resident process: runs one function after another."""

    def __init__(self, index: int, address: str, folder: Path) -> None:
        self._index = index
        self._address = address
        self._folder = folder

    def main(self) -> None:
        redirect_output(str(self._folder / f"worker{self._index}.log"))
        stacks = open(self._folder / f"worker{self._index}.stacks", "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.enable()
        pipe = Client(self._address, "AF_UNIX")
        pipe.send_bytes(pickle.dumps((self._index, os.getpid())))
        while True:
            try:
                task = pickle.loads(pipe.recv_bytes())
            except EOFError:
                os._exit(0)
            pipe.send_bytes(pickle.dumps(self._execute(task)))

    def _execute(self, task: dict[str, Any]) -> dict[str, Any]:
        saved = dict(os.environ)
        for name in RANK_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(task["env"])
        outcome: dict[str, Any] = {"error": None}
        try:
            load_substitutes()
            function: Any = importlib.import_module(task["module"])
            for part in task["qualname"].split("."):
                function = getattr(function, part)
            outcome["value"] = function(self._index, *task["args"])
        except BaseException as error:  # SystemExit of a test function included
            outcome.update(describe(error))
        try:
            importlib.import_module("smp").shutdown()
        except BaseException as error:
            if outcome["error"] is None:
                outcome.update(describe(error))
                outcome["traceback"] = "in smp.shutdown():\n" + outcome["traceback"]
        os.environ.clear()
        os.environ.update(saved)
        return outcome


def describe(error: BaseException) -> dict[str, Any]:
    """Describes an exception for the test session."""
    return {
        "error": type(error).__name__,
        "bases": [base.__name__ for base in type(error).__mro__],
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.monotonic(),
    }


def main() -> Callable[[], None] | None:
    die_with_parent()
    # Shells start background jobs with it ignored; scripts under test get Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser()
    parser.add_argument("--commands", type=int, required=True)
    parser.add_argument("--answers", type=int, required=True)
    options = parser.parse_args()
    zygote = Zygote(
        Connection(options.commands, writable=False), Connection(options.answers, readable=False)
    )
    preload()
    zygote._answer("ready")
    job = zygote.serve()
    if job is None:
        zygote.stop_children()
    return job


if __name__ == "__main__":
    child_job = main()
    if child_job is not None:
        child_job()
