"""``smp doctor``: versions, devices, pairs of ranks, and what is wrong, as one block to paste.

Each probe is a process with a time limit of its own, so that a probe that hangs or crashes (a dead
file system, a driver, an extension that does not load) leaves the rest of the report intact.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from smp_cli.doctor.probes import PROBES, python_path, run_probe
from smp_cli.doctor.report import print_report


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand ``doctor``."""
    parser = subparsers.add_parser(
        "doctor",
        help="versions, devices, pairs of ranks, and what is wrong",
        description="Prints versions, limits, devices, and the measured round trip and bandwidth "
        "between ranks, and in plain words what is wrong. The exit status is 1 if something is.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--only", metavar="PROBE,...", help=f"of {', '.join(p.name for p in PROBES)}"
    )
    parser.add_argument(
        "--hosts",
        action="store_true",
        help="the hosts of a job instead, started on each of them by the launcher of the job: "
        "addresses, round trips, bandwidth, clocks, versions, free space, variables of the network",
    )
    parser.add_argument("--limit-s", type=float, metavar="S", help="seconds for each probe")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Runs the probes.

    Returns:
        0 without a problem, 1 with one, 2 if `--only` names an unknown probe.
    """
    if arguments.hosts:
        return _examine_hosts(arguments.json)
    names = [p.name for p in PROBES] if arguments.only is None else arguments.only.split(",")
    unknown = sorted(set(names) - {probe.name for probe in PROBES})
    if unknown:
        print(f"smp doctor: no probe is called {unknown}", file=sys.stderr)
        return 2
    sections = []
    for probe in PROBES:  # one after the other, because some of them measure
        if probe.name in names:
            if sys.stderr.isatty():
                print(f"{probe.name} ...", file=sys.stderr, flush=True)
            sections.append(run_probe(probe, arguments.limit_s or probe.limit_s))
    print_report(sections, arguments.json)
    return int(any(section.problems for section in sections))


def _examine_hosts(as_json: bool) -> int:
    """Runs `smp_cli.doctor.hosts` in a process of its own, because that imports torch."""
    command = [sys.executable, "-m", "smp_cli.doctor.hosts", *(["--json"] if as_json else [])]
    env = {**os.environ, "PYTHONPATH": python_path(os.environ)}
    return subprocess.run(command, env=env, check=False).returncode
