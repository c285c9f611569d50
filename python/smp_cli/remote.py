"""Runs the ranks of a job on several hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from smp_cli import frames
from smp_cli.environment import Share, add_notes, failure_file
from smp_cli.hosts import Agent, HostPlan, own_address
from smp_cli.output import Write, say
from smp_cli.ranks import Ranks
from smp_cli.store import StoreProcess

_HELLO_S = 60.0
_HELLO_AGAIN_S = 20.0  # of hosts some of which may be lost; ssh tries for 10 s
_END_S = 5.0  # for the process of a host to end its ranks
_LAST_WORDS_S = 30.0  # for the last output of ranks that have ended
LOST = 255
"""Status of ranks whose host cannot be reached any more, as in ssh."""


#: Divides the ranks of a job over the hosts with these names.
Divide = Callable[[Set[str]], tuple[Share, list[HostPlan]]]


class HostError(RuntimeError):
    """A host does not take part; the text names it and the reason."""


@dataclass
class _Host:
    """The process on one host."""

    plan: HostPlan
    process: subprocess.Popen[bytes]
    status: int | None = None
    port: int | None = None
    """Port that is free there; None until the process has answered."""
    refusal: str = ""
    said: list[str] = field(default_factory=list)
    """Last lines that the agent itself has written."""
    late: list[int] = field(default_factory=list)
    """Processes that were started later, in place of others."""

    @property
    def processes(self) -> list[int]:
        """Returns the numbers of all processes that were started there."""
        return [*self.plan.ranks, *self.late]

    def send(self, order: str) -> None:
        """Sends an order to the process, if it still reads; `wait` notices its end."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):
            self.process.stdin.write(order.encode() + b"\n")
            self.process.stdin.flush()

    def hang_up(self) -> None:
        """Closes the connection, so that the process ends its ranks, and itself."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()


class RemoteRanks(Ranks):
    """Ranks that are started by a process on each host."""

    _max_line_bytes = sys.maxsize  # a message has many lines of a rank

    def __init__(
        self,
        share: Share,
        hosts: Sequence[HostPlan],
        agent: Agent,
        write: Write,
        meeting: Path,
        has_store: bool = False,
        divide: Divide | None = None,
    ) -> None:
        """
        Args:
            share: all processes; its environment is added to that of their hosts.
            hosts: division of the processes; the last ones wait.
            agent: command that starts the process on a host.
            write: destination of the ranks' output.
            meeting: folder for what ranks report of their failures.
            has_store: ranks meet in a store on this machine, not in one of rank 0.
            divide: divides fewer ranks over the hosts that answer when the job starts again; None:
                all hosts have to answer.
        """
        super().__init__()
        self._share, self._plans, self._agent = share, hosts, agent
        self._write, self._meeting = write, meeting
        self._hosts: list[_Host] = []
        self._unused: list[_Host] = []  # they are not to have ranks
        self._store = StoreProcess(own_address(hosts)) if has_store else None
        self._divide = divide
        self.spares = share.spares

    def start(self, restart_count: int) -> None:
        """Starts all ranks, once every host has answered.

        Raises:
            HostError: a host did not answer, or too few did when the job starts again.
        """
        for plan in self._plans:
            self._call(plan)
        if self._divide is None or not restart_count:
            self._wait_for_answers()
        else:
            self._wait_for_some(self._divide)
        for host in self._hosts:
            self._running |= set(host.plan.ranks)
        first, base = self._hosts[0], dict(self._share.environment)
        meeting = {"MASTER_ADDR": first.plan.address, "MASTER_PORT": str(first.port)}
        if self._store is not None:
            try:
                meeting["SMP_RENDEZVOUS"] = f"{self._store.url()}/{self._meeting.name}"
            except RuntimeError as error:
                raise HostError(f"{error}; the ranks are to meet there") from None
        num_spares = self._share.num_spares
        if num_spares is not None:
            base["SMP_SPARES"] = str(num_spares)
        for host in self._hosts:
            own = {"SM_CURRENT_HOST": host.plan.address} if "SM_HOSTS" in base else {}
            share = replace(
                self._share,
                environment={**meeting, **base, **own},
                first_rank=host.plan.first_rank,
                num_ranks=host.plan.num_ranks,
                num_spares=None,
            )
            order = {"restart_count": restart_count, "share": asdict(share)}
            host.send(json.dumps({**order, "stays": num_spares is not None}))

    def start_spare(self, replaced: int) -> int:
        number = self.spares.stop
        self.spares = range(self.spares.start, number + 1)
        self._running.add(number)
        alive = [host for host in self._hosts if host.status is None]
        if not alive:
            self._note_end(number, LOST)
            return number

        def load(host: _Host) -> tuple[bool, int]:
            return replaced not in host.processes, len(self._running & set(host.processes))

        host = min(alive, key=load)
        host.late.append(number)
        host.send(json.dumps({"start": number}))
        return number

    def _call(self, plan: HostPlan) -> None:
        words = self._agent.command(plan.name)
        try:
            process = self._launch(
                words,
                lambda status: self._end_host(host, status),
                (lambda lines: self._take(host, lines), lambda lines: self._note(host, lines)),
                stdin=subprocess.PIPE,
            )
        except OSError as error:
            raise HostError(
                f"host {plan.name}: cannot run {words[0]!r}: {error.strerror}; install it, or name "
                "another command with --agent"
            ) from None
        host = _Host(plan, process)
        self._hosts.append(host)

    def _wait_for_answers(self) -> None:
        deadline = time.monotonic() + _HELLO_S
        while silent := [host for host in self._hosts if host.port is None]:
            for host in silent:
                if host.status is not None:
                    raise HostError(self._refusal_of(host))
            if time.monotonic() > deadline:
                names = ", ".join(host.plan.name for host in silent)
                raise HostError(f"host {names}: no answer within {_HELLO_S:.0f} s")
            self.wait(max(0.0, deadline - time.monotonic()))

    def _wait_for_some(self, divide: Divide) -> None:
        """Waits for the hosts, and divides ranks over those that answer soon."""
        deadline = time.monotonic() + _HELLO_AGAIN_S
        while time.monotonic() < deadline and any(
            host.port is None and host.status is None for host in self._hosts
        ):
            self.wait(max(0.0, deadline - time.monotonic()))
        for host in self._hosts:
            if host.port is None:
                silent = f"host {host.plan.name}: no answer within {_HELLO_AGAIN_S:.0f} s"
                say(silent if host.status is None else self._refusal_of(host))
        answering = {h.plan.name for h in self._hosts if h.port is not None and h.status is None}
        self._share, self._plans = divide(answering)
        self.spares = self._share.spares
        plans = {plan.name: plan for plan in self._plans}
        for host in [host for host in self._hosts if host.plan.name not in plans]:
            host.plan = replace(host.plan, num_ranks=0)  # it may still answer, and end
            host.hang_up()
            self._unused.append(host)
            self._hosts.remove(host)
        for host in self._hosts:
            host.plan = plans[host.plan.name]
        say(f"{self._share.num_ranks} ranks are started on the hosts {', '.join(plans)}")

    def _refusal_of(self, host: _Host) -> str:
        said = "; ".join(host.said) or "it said nothing"
        return (
            f"host {host.plan.name}: {self._agent.words[0]} ended with status {host.status}: {said}"
        )

    def _take(self, host: _Host, lines: list[bytes]) -> None:
        """Takes the messages of a host (`frames`)."""
        for line in lines:
            match frames.read(line):
                case {"port": int(port)}:
                    host.port = port
                case {"rank": int(rank), "stream": stream, "lines": texts}:
                    self._write(rank, stream, [text.encode("latin-1") for text in texts])
                case {"rank": int(rank), "status": int(status), "failure": failure}:
                    if failure is not None:
                        failure_file(self._meeting, rank).write_text(failure)
                    self._note_end(rank, status)
                case {"notes": dict(notes)}:
                    for name, numbers in notes.items():
                        add_notes(self._meeting / name, numbers)
                case {"refusal": str(text)}:
                    host.refusal = text
                case _:
                    self._note(host, [line])  # a greeting of the shell

    def _note(self, host: _Host, lines: list[bytes]) -> None:
        for line in lines:
            text = line.decode("utf-8", "replace")
            host.said = [*host.said[-4:], text]
            if host.port is not None:
                print(f"[{host.plan.name}] {text}", file=sys.stderr, flush=True)

    def _end_host(self, host: _Host, status: int) -> None:
        """Notes that the agent of a host has ended."""
        host.status = status
        lost = sorted(self._running.intersection(host.processes))
        if lost and host.port is not None:
            why = host.refusal or f"{self._agent.words[0]} ended with status {status}"
            say(f"host {host.plan.name}: {why}; its ranks {lost} are lost")
            for rank in lost:
                self._note_end(rank, LOST)

    def send(self, number: signal.Signals) -> None:
        for host in self._hosts:
            if self._running.intersection(host.processes):
                host.send(str(int(number)))

    def stop(self, rank: int) -> None:
        for host in self._hosts:
            if rank in host.processes:
                host.send(json.dumps({"stop": rank}))

    def are_crowded(self, idle: Set[int]) -> bool:
        ranks = self._running - idle
        return any(len(ranks & set(host.processes)) > host.plan.num_ranks for host in self._hosts)

    def end(self) -> None:
        for host in self._hosts:
            host.hang_up()
        deadline = time.monotonic() + (_END_S if self._running else _LAST_WORDS_S)
        while any(host.status is None for host in self._hosts) and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())
        for host in [*self._hosts, *self._unused]:
            if host.process.poll() is None:
                os.killpg(host.process.pid, signal.SIGKILL)
                host.process.wait()
        if self._store is not None:
            self._store.close()
        super().end()
