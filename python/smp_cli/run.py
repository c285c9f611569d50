"""``smp run``: starts the ranks of one job as processes of this machine or of several hosts."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path

from smp_cli import events
from smp_cli.environment import Share, for_other_hosts, free_port, without_foreign
from smp_cli.hosts import AGENT, Agent, HostPlan, divide_again, plan_hosts
from smp_cli.output import Output, say
from smp_cli.preflight import find_problems
from smp_cli.ranks import LocalRanks, Ranks
from smp_cli.remote import Divide, HostError, RemoteRanks
from smp_cli.sagemaker import CONFIG_FORM, read_config, variables
from smp_cli.supervisor import EXIT_NOT_STARTED, Limits, run_job

_EXAMPLES = """\
examples:
  smp run -n 4 train.py --epochs 3
  smp run -n 4 --config pipeline_parallel_degree=2,microbatches=4,ddp=True train.py
  smp run -n 4 --max-restarts 3 --log-dir logs -m package.train
  smp run -n 16 --hosts node1,node2 --preflight train.py
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand ``run``."""
    parser = subparsers.add_parser(
        "run",
        help="start a script in several processes of this machine, or of several hosts",
        description="Starts a script once per rank, passes signals on, and ends all ranks when one "
        "fails. The exit status is that of the rank that failed first.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-n", "--ranks", type=_at_least(1), required=True, help="number of processes")
    add("--config", metavar=CONFIG_FORM, help="configuration, passed on as SageMaker does")
    add(
        "--max-restarts",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="start all ranks again after a failure, N times at most (0); with N > 0 also whenever "
        "they exit with 75, which means that they saved and are to be resumed",
    )
    add(
        "--spares",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="start N processes more, which wait for the places of ranks that die (0); with "
        "on_failure: spare in the configuration. With --hosts they are the last ones",
    )
    add(
        "--max-replacements",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="start a process that waits for each one that has failed, or whose replica is broken, "
        "while the others go on, N times at most (0); with on_failure: spare in the configuration",
    )
    add(
        "--store",
        action="store_true",
        help="with --hosts: the ranks meet in a store of this command, not in one of rank 0, so "
        "that they can go on without it (on_failure: shrink); --spares and --max-replacements do "
        "so anyway",
    )
    add(
        "--fewer-ranks",
        action="append",
        default=[],
        metavar=f"N[:{CONFIG_FORM}]",
        help="with --hosts and --max-restarts: when hosts are lost, start again with N ranks on "
        "those that are left, with this configuration in place of --config; may be given several "
        "times, and the largest N that fits counts. Ranks that have gone on first save a "
        "checkpoint",
    )
    add(
        "--grace-s",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds in which the other ranks can end by themselves after a failure (10)",
    )
    add(
        "--output",
        choices=("prefix", "raw"),
        default="prefix",
        help="put the rank in front of each line (default), or pass the output on unchanged",
    )
    add("--log-dir", type=Path, metavar="DIR", help="also write DIR/rank<r>.log")
    add("--events", type=Path, metavar="FILE", help="append a line of JSON for each event")
    add("--manifest", type=Path, metavar="FILE", help="describe the job in a JSON file")
    add(
        "--torch-env",
        action="store_true",
        help="also set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun does. Not "
        "for Hugging Face: Accelerate would take the job for plain data parallelism",
    )
    add(
        "--hosts",
        metavar="A,B|A:2,B:1",
        help="hosts of the job; rank 0 is on the first. All ranks reach it under this name, or "
        "under MASTER_ADDR if that is set. All hosts need the script, the interpreter and the "
        "current folder under the same paths",
    )
    add(
        "--agent",
        metavar="COMMAND",
        default=AGENT,
        help="starts a process on a host: called with the host and a command (%(default)s)",
    )
    add("--python", default=sys.executable, help="the interpreter on the hosts (that of smp)")
    add(
        "--preflight",
        action="store_true",
        help="with --hosts: first check them, as smp doctor --hosts does, and start nothing if a "
        "check fails",
    )
    add(
        "--sm-dir",
        type=Path,
        default=Path("sagemaker"),
        metavar="DIR",
        help="with --config: folder of SM_MODEL_DIR and the like, if they are not set (sagemaker)",
    )
    add("-m", "--module", action="store_true", help="SCRIPT is a module")
    add("script", metavar="SCRIPT")
    add("args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Runs the job; returns the exit status."""
    base = events.with_run(without_foreign(os.environ))
    for variable, path in (
        (events.PATH_VARIABLE, arguments.events),
        (events.MANIFEST_VARIABLE, arguments.manifest),
    ):
        if path is not None:
            base[variable] = str(path.absolute())
    try:
        num_processes = arguments.ranks + arguments.spares
        hosts = plan_hosts(arguments.hosts, num_processes) if arguments.hosts else []
        waits = arguments.spares or arguments.max_replacements
        if waits and arguments.torch_env:
            raise ValueError("--spares and --max-replacements go without --torch-env")
        if arguments.store and not hosts:
            raise ValueError("--store is for several hosts (--hosts)")
        if waits and not arguments.max_replacements:
            base.setdefault("SMP_REPLACEMENT_S", "0")  # no process comes later
        if arguments.preflight and len(hosts) < 2:
            raise ValueError("--preflight compares hosts; name at least two with --hosts")
        fewer = _read_fewer(arguments, base, hosts)
        if arguments.config is not None:
            base |= _sagemaker_variables(arguments.config, arguments, base, hosts)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    agent = Agent(shlex.split(arguments.agent), arguments.python)
    if arguments.preflight:
        problems = find_problems(hosts, agent, for_other_hosts(base))
        if problems:
            for problem in problems:
                say(f"preflight: {problem}")
            say("nothing is started")
            return EXIT_NOT_STARTED
    python = agent.python if hosts else sys.executable
    module = ["-m"] if arguments.module else []
    command = [python, *module, arguments.script, *arguments.args]
    share = Share(
        command, base, arguments.ranks, arguments.ranks,
        torch_env=arguments.torch_env, num_spares=arguments.spares if waits else None,
    )  # fmt: skip
    make = _make_ranks(arguments, share, hosts, agent, fewer)
    job_events = events.JobEvents(base)
    limits = Limits(
        arguments.max_restarts, arguments.max_replacements, bool(fewer), arguments.grace_s
    )
    return run_job(make, limits, job_events)


def _read_fewer(
    arguments: argparse.Namespace, base: dict[str, str], hosts: list[HostPlan]
) -> dict[int, dict[str, str]]:
    """Returns further variables for each number of ranks with which the job may go on."""
    found = dict[int, dict[str, str]]()
    if arguments.fewer_ranks and not (hosts and arguments.max_restarts):
        raise ValueError("--fewer-ranks is for several hosts, and goes with --hosts --max-restarts")
    for text in arguments.fewer_ranks:
        number, colon, config = text.partition(":")
        if not number.isdecimal() or not 0 < int(number) < arguments.ranks or int(number) in found:
            raise ValueError(
                f"--fewer-ranks {text!r}: expected a number of ranks below that of -n, "
                f"{arguments.ranks}, each once, and perhaps a configuration: N:{CONFIG_FORM}"
            )
        found[int(number)] = _sagemaker_variables(config, arguments, base, hosts) if colon else {}
    return found


def _divider(share: Share, hosts: list[HostPlan], fewer: dict[int, dict[str, str]]) -> Divide:
    """Returns a function that divides as many ranks as fit over the hosts that are left."""

    def divide(answering: Set[str]) -> tuple[Share, list[HostPlan]]:
        waits = share.num_spares is not None
        try:
            number, plans = divide_again(hosts, answering, [share.num_ranks, *fewer], waits)
        except ValueError as error:
            raise HostError(str(error)) from None
        environment = {**share.environment, **fewer.get(number, {})}
        if "SM_HOSTS" in environment:
            environment["SM_HOSTS"] = json.dumps([plan.address for plan in plans])
        num_spares = plans[-1].ranks.stop - number if waits else None
        less = replace(
            share,
            environment=environment, num_ranks=number, world_size=number, num_spares=num_spares,
        )  # fmt: skip
        return less, plans

    return divide


def _sagemaker_variables(
    config: str, arguments: argparse.Namespace, base: dict[str, str], hosts: list[HostPlan]
) -> dict[str, str]:
    known = dict(base)
    if hosts:
        known.setdefault("SM_HOSTS", json.dumps([host.address for host in hosts]))
    found = variables(read_config(config), known, arguments.sm_dir.absolute())
    found["SM_HOSTS"] = {**known, **found}["SM_HOSTS"]
    for name in ("SM_MODEL_DIR", "SM_OUTPUT_DATA_DIR"):
        Path({**base, **found}[name]).mkdir(parents=True, exist_ok=True)
    return found


def _make_ranks(
    arguments: argparse.Namespace,
    share: Share,
    hosts: list[HostPlan],
    agent: Agent,
    fewer: dict[int, dict[str, str]],
) -> Callable[[Path], Ranks]:
    """Returns a function that makes the ranks of one start, with the folder for it."""
    prefix, logs = arguments.output == "prefix", arguments.log_dir
    is_direct = not (hosts or prefix or logs)
    write = None if is_direct else Output(prefix, logs, len(share.ranks)).write

    def here(meeting: Path) -> Ranks:
        environment = {
            # Scripts may use torch.distributed themselves with these; smp meets in a file.
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port("127.0.0.1")),
            **share.environment,
            "SMP_RENDEZVOUS": f"file://{meeting}/rendezvous",
        }
        return LocalRanks(replace(share, environment=environment), write, meeting)

    def on_hosts(meeting: Path) -> Ranks:
        assert write is not None
        everywhere = replace(share, environment=for_other_hosts(share.environment))
        has_store = arguments.store or share.num_spares is not None
        divide = _divider(everywhere, hosts, fewer) if fewer else None
        return RemoteRanks(everywhere, hosts, agent, write, meeting, has_store, divide)

    return on_hosts if hosts else here


def _at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {least}")
        return int(text)

    return read
