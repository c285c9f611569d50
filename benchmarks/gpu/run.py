"""``python -m benchmarks.gpu.run <part>``: runs a part; the status is 1 if something failed."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

from benchmarks.gpu import processes
from benchmarks.gpu.device import Device, Named
from benchmarks.gpu.figures import Figures, parser
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.rows import Supervisor, run_rows


def main() -> int:
    arguments_of = parser(__doc__)
    arguments_of.add_argument("part", choices=list(PARTS))
    arguments_of.add_argument("--begin", type=int, help="first row of a child")
    arguments_of.add_argument("--reports", type=int, help="a child's descriptor of a pipe")
    arguments = arguments_of.parse_args()
    if arguments.begin is None:
        return supervise(arguments)
    device = Device(arguments.device)
    rows = PARTS[arguments.part].rows(device.is_dry)
    figures = Figures(arguments.part, arguments.out, device, arguments.limit_s, is_new=False)
    run_rows(figures, rows, arguments.begin, Connection(arguments.reports, readable=False))
    return 0


def supervise(arguments: argparse.Namespace) -> int:
    """Runs all rows; returns the status of the part."""
    # An exception ends what this process has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    processes.adopt_orphans()
    part, begin = arguments.part, time.monotonic()
    device = Named(arguments.device)
    figures = Figures(part, arguments.out, device, arguments.limit_s)

    def command(first: int, descriptor: int) -> list[str]:
        words = [sys.executable, "-u", "-m", "benchmarks.gpu.run", part]
        words += ["--out", str(arguments.out), "--device", arguments.device]
        words += ["--limit-s", str(figures.left_s())]
        return [*words, "--begin", str(first), "--reports", str(descriptor)]

    def clean() -> None:
        processes.end_descendants(os.getpid())

    try:
        Supervisor(figures, command, clean).run()
    finally:
        clean()
    figures.add("seconds of the part", time.monotonic() - begin, "s")
    failed = figures.failed()
    if failed:
        print(f"FAILED {part}: {len(failed)} of its figures", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
