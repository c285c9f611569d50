"""Runs the ranks of a job on several hosts, with the interface of `Ranks` for one machine."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smp_cli import frames
from smp_cli.hosts import Agent, HostPlan
from smp_cli.output import LineRelay, Output, Writers, say
from smp_cli.ranks import die_with_parent

_HELLO_S = 60.0
_END_S = 5.0  # for the process of a host to end its ranks
_LAST_WORDS_S = 30.0  # for the last output of ranks that have ended
LOST = 255
"""Status of ranks whose host cannot be reached any more, as in ssh."""


class HostError(RuntimeError):
    """A host does not take part; the text names it and the reason."""


@dataclass(frozen=True)
class RemoteJob:
    """A job that runs on several hosts."""

    command: list[str]
    hosts: Sequence[HostPlan]
    agent: Agent
    environment: Mapping[str, str]
    """Variables of all ranks, in addition to those of their hosts."""
    torch_env: bool = False
    folder: str = field(default_factory=os.getcwd)
    """Current folder of all ranks."""


class _Host:
    """The process on one host."""

    def __init__(self, plan: HostPlan, process: subprocess.Popen[bytes]) -> None:
        self.plan, self.process = plan, process
        self.running = set(plan.ranks)
        self.port: int | None = None
        self.refusal = ""
        self.said: list[str] = []
        """Last lines that the agent itself has written to its standard error."""

    def send(self, kind: str, **content: Any) -> None:
        """Sends an order to the process, if it still reads."""
        assert self.process.stdin is not None
        try:
            frames.send(self.process.stdin, kind, **content)
        except (OSError, ValueError):
            pass  # its end is noticed where its output is read

    def hang_up(self) -> None:
        """Closes the connection, so that the process ends its ranks, and itself."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except OSError:
            pass


class RemoteRanks:
    """Ranks that are started by processes on other hosts."""

    def __init__(self, job: RemoteJob, output: Output, is_first: bool, folder: Path) -> None:
        """
        Args:
            job: job to run.
            output: destination of the ranks' output.
            is_first: log files are truncated; otherwise they are continued.
            folder: folder for ``failure<rank>.json`` of ranks that report why they failed.
        """
        self._job, self._folder = job, folder
        self._selector = selectors.DefaultSelector()
        self._hosts: list[_Host] = []
        self._writers: dict[int, Writers] = {
            rank: output.open(rank, is_first) for host in job.hosts for rank in host.ranks
        }
        self._relays: dict[int, tuple[_Host, LineRelay]] = {}
        self.ended: list[tuple[int, int]] = []
        """Rank and status of ended processes, in the order of their ends."""

    @property
    def running(self) -> list[int]:
        """Returns the ranks that have not ended."""
        return sorted(rank for host in self._hosts for rank in host.running)

    def start(self, restart_count: int) -> None:
        """Starts all ranks, once every host has answered.

        Raises:
            HostError: a host did not answer.
        """
        for plan in self._job.hosts:
            self._call(plan)
        self._wait_for_hellos()
        first, base = self._hosts[0], self._job.environment
        meeting = {"MASTER_ADDR": first.plan.address, "MASTER_PORT": str(first.port)}
        for host in self._hosts:
            own = {"SM_CURRENT_HOST": host.plan.address} if "SM_HOSTS" in base else {}
            host.send(
                "run",
                command=self._job.command,
                environment={**meeting, **base, **own},
                folder=self._job.folder,
                first_rank=host.plan.first_rank,
                local_size=host.plan.num_ranks,
                world_size=sum(plan.num_ranks for plan in self._job.hosts),
                restart_count=restart_count,
                torch_env=self._job.torch_env,
            )

    def _call(self, plan: HostPlan) -> None:
        words = self._job.agent.command(plan.name)
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),
            )
        except OSError as error:
            raise HostError(
                f"host {plan.name}: cannot run {words[0]!r}: {error.strerror}; install it, or name "
                "another command with --agent"
            ) from None
        host = _Host(plan, process)
        self._hosts.append(host)
        assert process.stdout is not None and process.stderr is not None
        for stream, take in (
            (process.stdout, lambda lines: self._take(host, lines)),
            (process.stderr, lambda lines: self._note(host, lines)),
        ):
            relay = LineRelay(os.dup(stream.fileno()), take)
            stream.close()
            self._relays[relay.fd] = (host, relay)
            self._selector.register(relay.fd, selectors.EVENT_READ)

    def _wait_for_hellos(self) -> None:
        deadline = time.monotonic() + _HELLO_S
        while silent := [host for host in self._hosts if host.port is None]:
            self.wait(max(0.0, deadline - time.monotonic()))
            for host in silent:
                if host.port is None and not self._is_open(host):
                    status = host.process.wait()
                    said = "; ".join(host.said) or "it said nothing"
                    raise HostError(
                        f"host {host.plan.name}: {self._job.agent.words[0]} ended with status "
                        f"{status}: {said}"
                    )
            if time.monotonic() > deadline:
                names = ", ".join(host.plan.name for host in silent)
                raise HostError(f"host {names}: no answer within {_HELLO_S:.0f} s")

    def _is_open(self, host: _Host) -> bool:
        return any(one is host for one, _ in self._relays.values())

    # ---- messages of hosts ------------------------------------------------------

    def wait(self, timeout_s: float) -> None:
        """Relays output and notes ends; returns after the first event or the timeout."""
        for key, _ in self._selector.select(timeout_s):
            assert isinstance(key.fd, int)
            host, relay = self._relays[key.fd]
            if relay.pump():
                continue
            self._end_relay(key.fd)
            if not self._is_open(host):
                self._note_silence(host)

    def _take(self, host: _Host, lines: list[bytes]) -> None:
        for line in lines:
            said = frames.read(line, frames.MARK)
            if said is None:
                self._note(host, [line])  # a greeting of the shell
            elif said["kind"] == "hello":
                host.port = said["port"]
            elif said["kind"] == "lines":
                writers = self._writers[said["rank"]]
                write = writers.out if said["stream"] == "out" else writers.err
                write([frames.to_bytes(text) for text in said["lines"]])
            elif said["kind"] == "ended":
                self._note_end(host, said["rank"], said["status"], said["failure"])
            elif said["kind"] == "refused":
                host.refusal = said["text"]

    def _note(self, host: _Host, lines: list[bytes]) -> None:
        for line in lines:
            text = line.decode("utf-8", "replace")
            host.said = [*host.said[-4:], text]
            if host.port is not None:
                print(f"[{host.plan.name}] {text}", file=sys.stderr, flush=True)

    def _note_end(self, host: _Host, rank: int, status: int, failure: str | None) -> None:
        if failure is not None:
            (self._folder / f"failure{rank}.json").write_text(failure)
        host.running.discard(rank)
        self.ended.append((rank, status))

    def _note_silence(self, host: _Host) -> None:
        """Notes that the agent of a host has ended."""
        status = host.process.wait()
        if not host.running or host.port is None:
            return
        why = host.refusal or f"{self._job.agent.words[0]} ended with status {status}"
        say(f"host {host.plan.name}: {why}; its ranks {sorted(host.running)} are lost")
        for rank in sorted(host.running):
            self._note_end(host, rank, LOST, None)

    def _end_relay(self, fd: int) -> None:
        self._selector.unregister(fd)
        self._relays.pop(fd)[1].close()

    # ---- ends ------------------------------------------------------------------

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the running ranks; SIGKILL also to their child processes."""
        for host in self._hosts:
            if host.running:
                host.send("signal", signal=int(number))

    def kill(self) -> None:
        """Ends the ranks and the processes on the hosts, and relays their last output."""
        for host in self._hosts:
            host.hang_up()
        deadline = time.monotonic() + (_END_S if self.running else _LAST_WORDS_S)
        while self._relays and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())
        for host in self._hosts:
            if host.process.poll() is None:
                os.killpg(host.process.pid, signal.SIGKILL)
                host.process.wait()

    def close(self) -> None:
        """Frees everything."""
        for fd in list(self._relays):
            self._end_relay(fd)
        for writers in self._writers.values():
            writers.close()
        self._selector.close()
