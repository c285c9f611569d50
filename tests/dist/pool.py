"""A resident pool of worker processes for tests with several ranks.

``pool.run(world_size, function, *args)`` calls ``function(rank, *args)`` in the
first `world_size` workers and returns their results, rank by rank. The function
is found by its name, so it has to be at the top level of a module; arguments and
results are pickled. ``smp.shutdown()`` follows each run, hence the next one may
use another layout.

The first rank that fails is the failure of the test. When a run takes too long,
every rank writes its Python stacks, which become part of the failure. After any
failure the workers are replaced.
"""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from tests.installed import python_path
from tests.patience import PATIENCE_S

NUM_WORKERS = 8
_REPO = Path(__file__).resolve().parents[2]
# After one rank has failed in a run that should not, the others have this long to fail as well.
_GRACE_S = 12.0

#: for tests that count what a step does: the first one runs more to be checked
WITHOUT_CHECKS = {"SMP_CHECK_FIRST_STEP": "0"}


class RankFailure(AssertionError):
    """A run failed; the text holds the first failing rank's traceback."""


@dataclass(frozen=True)
class Outcome:
    """Holds the value that one rank returned, or the error that it raised."""

    rank: int
    value: Any = None
    error: str | None = None  # class name of the exception
    bases: tuple[str, ...] = ()  # class names of its bases, itself included
    message: str = ""
    traceback: str = ""
    time: float = 0.0


class ZygoteProcess:
    """Starts the zygote and talks to it (see `zygote.py`).

    Args:
        folder: folder of its output.
        settings: additional environment variables of the zygote and of its forks.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        env = dict(os.environ)
        env["PYTHONPATH"] = python_path(_REPO, env.get("PYTHONPATH", ""))
        env.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        env.setdefault("HF_HUB_OFFLINE", "1")
        env.update(settings)
        self.log = folder / "zygote.log"
        with open(self.log, "w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.dist.zygote"]
                + [f"--commands={commands}", f"--answers={answers}"],
                pass_fds=(commands, answers),
                env=env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        os.close(commands)
        os.close(answers)
        self._to = Connection(self._commands, readable=False)
        self._from = Connection(self._answers, writable=False)
        self._ended: dict[int, tuple[int, float]] = {}
        self._expect("ready", timeout=PATIENCE_S)

    def alive(self) -> bool:
        return self._process.poll() is None

    def start(self, *command: Any) -> list[int]:
        """Forks; returns the pids."""
        self._to.send_bytes(pickle.dumps(command))
        pids: list[int] = self._expect("started", timeout=PATIENCE_S)[0]
        return pids

    def ended(self, pid: int) -> tuple[int, float] | None:
        """(return code, time) of a child, or None while it lives."""
        while self._from.poll(0):
            self._take()
        return self._ended.get(pid)

    def kill(self, pid: int) -> None:
        """SIGKILL to a child of the zygote that has not ended."""
        if self.ended(pid) is None:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def close(self) -> None:
        self._to.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._from.close()

    def _take(self) -> tuple[Any, ...]:
        try:
            answer: tuple[Any, ...] = pickle.loads(self._from.recv_bytes())
        except EOFError:
            raise RankFailure(
                f"the zygote ended with status {self._process.wait(10)}:\n{self.log.read_text()}"
            ) from None
        if answer[0] == "ended":
            self._ended[answer[1]] = (answer[2], answer[3])
        elif answer[0] == "started":
            for pid in answer[1]:  # pids come round again
                self._ended.pop(pid, None)
        return answer

    def _expect(self, kind: str, timeout: float) -> tuple[Any, ...]:
        deadline = time.monotonic() + timeout
        while True:
            if not self._from.poll(max(0.0, deadline - time.monotonic())):
                raise RankFailure(f"no '{kind}' from the zygote in {timeout} s")
            answer = self._take()
            if answer[0] == kind:
                return answer[1:]


class Pool:
    """Eight resident workers, started when first needed.

    Args:
        settings: variables that all its processes have besides.
    """

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._settings = dict(settings or {})
        self._folder = Path(tempfile.mkdtemp(prefix="smp-pool-"))
        self._zygote: ZygoteProcess | None = None
        self._generations = itertools.count()
        self._run_ids = itertools.count()
        self._workers: list[tuple[int, Connection]] = []
        self._worker_folder = self._folder

    # ---- running -----------------------------------------------------------

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = PATIENCE_S,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """Results of ``function(rank, *args)``; the first failure is raised."""
        outcomes = self._outcomes(world_size, function, args, timeout, _GRACE_S, env)
        failed = sorted((o for o in outcomes if o.error), key=lambda o: o.time)
        if failed:
            first = failed[0]
            others = "\n".join(
                f"  rank {o.rank}: {o.error}: {_brief(o.message)}" for o in failed[1:]
            )
            fine = [o.rank for o in outcomes if not o.error]
            raise RankFailure(
                f"rank {first.rank} of {world_size} failed first:\n{first.traceback}"
                + (f"\nthen:\n{others}" if others else "")
                + (f"\nranks without an error: {fine}" if fine else "")
                + self._log_tail(first.rank)
            )
        return [o.value for o in outcomes]

    def outcomes(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = PATIENCE_S,
        env: dict[str, str] | None = None,
    ) -> list[Outcome]:
        """Like `run`, but an error is an outcome; for tests that want one."""
        return self._outcomes(world_size, function, args, timeout, timeout, env)

    def _outcomes(
        self,
        world_size: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float,
        grace: float,
        env: dict[str, str] | None,
    ) -> list[Outcome]:
        if not 1 <= world_size <= NUM_WORKERS:
            raise ValueError(f"world_size {world_size} is not in 1..{NUM_WORKERS}")
        self._ensure_workers()
        rendezvous = self._folder / f"rendezvous{next(self._run_ids)}"
        shared = {"SMP_RENDEZVOUS": f"file://{rendezvous}", "WORLD_SIZE": str(world_size)}
        shared |= {"LOCAL_WORLD_SIZE": str(world_size), **(env or {})}
        for rank in range(world_size):
            task = {
                "module": function.__module__,
                "qualname": function.__qualname__,
                "args": args,
                "env": {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared},
            }
            self._workers[rank][1].send_bytes(pickle.dumps(task))
        outcomes = self._collect(world_size, timeout, grace)
        if any(o.error for o in outcomes):
            self._discard_workers()
        return outcomes

    def _collect(self, world_size: int, timeout: float, grace: float) -> list[Outcome]:
        deadline = time.monotonic() + timeout
        waiting = {self._workers[rank][1]: rank for rank in range(world_size)}
        outcomes: dict[int, Outcome] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._raise_timeout(timeout, grace, sorted(waiting.values()), outcomes)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                outcomes[rank] = self._receive(rank, pipe)
                if outcomes[rank].error:
                    deadline = min(deadline, time.monotonic() + grace)
        return [outcomes[rank] for rank in range(world_size)]

    def _receive(self, rank: int, pipe: Connection) -> Outcome:
        try:
            return Outcome(rank, **pickle.loads(pipe.recv_bytes()))
        except (EOFError, ConnectionResetError):
            assert self._zygote is not None
            pid = self._workers[rank][0]
            time.sleep(0.1)  # the zygote looks for ended children 100 times a second
            status = self._zygote.ended(pid)
            text = f"the process of rank {rank} ended with status {status and status[0]}"
            return Outcome(
                rank, error="ProcessEnded", message=text, traceback=text, time=time.monotonic()
            )

    def _raise_timeout(
        self, timeout: float, grace: float, missing: list[int], outcomes: dict[int, Outcome]
    ) -> None:
        for rank in missing:
            try:
                os.kill(self._workers[rank][0], signal.SIGUSR1)
            except ProcessLookupError:
                pass
        time.sleep(1.0)
        parts = [
            f"ranks {missing} did not finish in time ({timeout} s, or {grace} s after a failure)"
        ]
        for outcome in sorted(outcomes.values(), key=lambda o: o.time):
            if outcome.error:
                parts.append(f"rank {outcome.rank} failed:\n{outcome.traceback}")
        for rank in missing:
            stacks = (self._worker_folder / f"worker{rank}.stacks").read_text()
            parts.append(f"stacks of rank {rank}:\n{stacks}{self._log_tail(rank)}")
        self._discard_workers()
        raise RankFailure("\n\n".join(parts))

    def _log_tail(self, rank: int) -> str:
        path = self._worker_folder / f"worker{rank}.log"
        text = path.read_text()[-3000:] if path.exists() else ""
        return f"\noutput of rank {rank}:\n{text}" if text.strip() else ""

    # ---- processes ---------------------------------------------------------

    def zygote(self) -> ZygoteProcess:
        """The zygote, started when first needed (or when it was lost)."""
        if self._zygote is None or not self._zygote.alive():
            self._workers = []
            self._zygote = ZygoteProcess(self._folder, self._settings)
        return self._zygote

    def _ensure_workers(self) -> None:
        zygote = self.zygote()
        if self._workers and all(zygote.ended(pid) is None for pid, _ in self._workers):
            return
        self._discard_workers()
        self._worker_folder = self._folder / f"generation{next(self._generations)}"
        self._worker_folder.mkdir()
        address = str(self._worker_folder / "socket")
        with Listener(address, "AF_UNIX", backlog=NUM_WORKERS) as listener:
            pids = zygote.start("workers", NUM_WORKERS, address, str(self._worker_folder))
            pipes: dict[int, tuple[int, Connection]] = {}
            for _ in pids:
                pipe = listener.accept()
                index, pid = pickle.loads(pipe.recv_bytes())
                pipes[index] = (pid, pipe)
        self._workers = [pipes[i] for i in range(NUM_WORKERS)]

    def _discard_workers(self) -> None:
        for pid, pipe in self._workers:
            pipe.close()
            if self._zygote is not None:
                self._zygote.kill(pid)
        self._workers = []

    def close(self) -> None:
        """Ends every process and removes the files."""
        self._discard_workers()
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _brief(message: str) -> str:
    line = message.strip().splitlines()[0] if message.strip() else ""
    return line if len(line) <= 300 else line[:300] + " ..."
