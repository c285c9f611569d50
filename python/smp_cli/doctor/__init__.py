"""``smp doctor``: what a machine has and what is wrong with it, as one block to paste.

Each probe is a process with a time limit of its own, so that nothing that hangs or crashes (a dead
file system, a driver, an extension that does not load) takes the report with it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from smp_cli.doctor.calibration import calibrate
from smp_cli.doctor.probes import PROBES, Probe, python_path, run_probe
from smp_cli.doctor.report import Section, to_text

_NUM_AT_ONCE = 4


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand ``doctor``."""
    parser = subparsers.add_parser(
        "doctor",
        help="versions, devices, transports and limits, and what is wrong",
        description="Prints versions, build flags, devices, transports with a measured "
        "round trip and bandwidth, shared memory, limits and the file system, and in plain words "
        "what is wrong. The exit status is 1 if something is.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--only", metavar="PROBE,...", help=f"of {', '.join(p.name for p in PROBES)}"
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help="measure the device and its links instead, for smp plan --hardware FILE",
    )
    parser.add_argument(
        "--hosts",
        action="store_true",
        help="the hosts of a job instead, started on each of them by the launcher of the job: "
        "addresses, round trips, bandwidth, clocks, versions, free space, variables of the network",
    )
    parser.add_argument("--limit-s", type=float, metavar="S", help="seconds for each probe")
    parser.set_defaults(execute=execute)


def _run(probes: Sequence[Probe], limit_s: float | None) -> list[Section]:
    """Those that only look at once, then those that measure, one after the other."""

    def run(probe: Probe) -> Section:
        return run_probe(probe, limit_s or probe.limit_s)

    with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
        looking = {p.name: pool.submit(run, p) for p in probes if not p.measures}
    sections = []
    for probe in probes:
        if probe.measures and sys.stderr.isatty():
            print(f"measuring {probe.name} ...", file=sys.stderr, flush=True)
        sections.append(run(probe) if probe.measures else looking[probe.name].result())
    return sections


def _look_at_hosts(as_json: bool) -> int:
    """In a process of its own, with the launcher's variables, because it imports torch."""
    command = [sys.executable, "-m", "smp_cli.doctor.hosts", *(["--json"] if as_json else [])]
    env = {**os.environ, "PYTHONPATH": python_path(os.environ)}
    return subprocess.run(command, env=env, check=False).returncode


def execute(arguments: argparse.Namespace) -> int:
    """Runs the probes; 1 when something is wrong, 2 for a probe that there is not."""
    if arguments.calibrate:
        return calibrate(arguments.calibrate)
    if arguments.hosts:
        return _look_at_hosts(arguments.json)
    probes: Sequence[Probe] = PROBES
    if arguments.only:
        names = arguments.only.split(",")
        unknown = sorted(set(names) - {probe.name for probe in PROBES})
        if unknown:
            print(f"smp doctor: no probe is called {unknown}", file=sys.stderr)
            return 2
        probes = [probe for probe in PROBES if probe.name in names]
    sections = _run(probes, arguments.limit_s)
    if arguments.json:
        print(json.dumps({s.name: s.to_json() for s in sections}, indent=2))
    else:
        print(to_text(sections))
    return int(any(section.problems for section in sections))
