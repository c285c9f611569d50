"""``smp store``: a place where ranks meet, and which lives longer than any of them."""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys

from smp_cli.ranks import die_with_parent

_LONG_S = 365 * 24 * 3600


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand ``store``."""
    parser = subparsers.add_parser(
        "store",
        help="where the ranks of jobs meet that go on without lost ones",
        description="Serves PyTorch's key-value store until SIGTERM or Ctrl-C. Ranks whose "
        "SMP_RENDEZVOUS names it meet there; it has to live as long as their jobs. Whoever reaches "
        "the port may read and write.",
    )
    add = parser.add_argument
    add("--address", default="", help="address to listen at (all of this host)")
    add("--port", type=int, default=0, help="port to listen at (a free one)")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Serves the store; returns the exit status."""
    try:
        family = socket.AF_INET6 if ":" in arguments.address else socket.AF_INET
        listener = socket.create_server(
            (arguments.address, arguments.port), family=family, backlog=1024
        )
    except (OSError, OverflowError) as error:
        where = f"{arguments.address or 'all addresses'}, port {arguments.port}"
        print(f"smp store: cannot listen at {where}: {error}; choose another --port or --address")
        return 1
    # Ctrl-C would end the import of torch with a long traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    from datetime import timedelta

    from smp._torch_releases import tcp_store

    host, port = listener.getsockname()[:2]
    _store = tcp_store(
        host,
        port,
        1,
        True,
        timeout=timedelta(seconds=_LONG_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    name = arguments.address or socket.gethostname()
    print(f"smp store: SMP_RENDEZVOUS=tcp://{name}:{port}/<name of the job>", flush=True)
    signal.sigwait((signal.SIGINT, signal.SIGTERM))
    os._exit(0)  # the end of a store that has clients takes seconds


class StoreProcess:
    """``smp store`` as a child process, which imports torch meanwhile.

    Args:
        address: address of this machine to listen at.
    """

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-m", "smp_cli", "store", "--address", address]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the ranks
            preexec_fn=die_with_parent(os.getpid()),
        )

    def url(self) -> str:
        """Returns the value of ``SMP_RENDEZVOUS``, once the store listens.

        Raises:
            RuntimeError: it does not.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode().strip()
        found = re.search(r"SMP_RENDEZVOUS=(tcp://.*)/", line)
        if found is None:
            raise RuntimeError(line or "smp store has ended without a word")
        return found[1]

    def close(self) -> None:
        """Ends the store. May be called twice."""
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
