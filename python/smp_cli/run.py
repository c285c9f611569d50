"""``smp run``: the ranks of one job as processes of this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from smp_cli.cores import usable_cores
from smp_cli.output import Output
from smp_cli.sagemaker import read_config, variables
from smp_cli.supervisor import Attempt, Job, run_job

# Set by other launchers; a script that reads them would take our ranks for theirs.
_FOREIGN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"),
)
_EXAMPLES = """\
examples:
  smp run -n 4 train.py --epochs 3
  smp run -n 4 --config pipeline_parallel_degree=2,microbatches=4,ddp=True train.py
  smp run -n 4 --max-restarts 3 --log-dir logs -m package.train
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand ``run``."""
    parser = subparsers.add_parser(
        "run",
        help="start a script in several processes of this machine",
        description="Starts a script once per rank, passes signals on, and ends all ranks when one "
        "fails. The exit status is that of the rank that failed first.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-n", "--ranks", type=_positive, required=True, help="number of processes")
    add("--config", metavar="FILE.json|KEY=VALUE,...", help="configuration, as SageMaker passes it")
    add(
        "--max-restarts",
        type=_natural,
        default=0,
        metavar="N",
        help="after a failure start all ranks again, N times at most (0); with N > 0 also whenever "
        "they exit with 75, which means that they saved and want to be resumed",
    )
    add(
        "--grace-s",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds for the other ranks to end after one has failed, before they are ended (10)",
    )
    add(
        "--output",
        choices=("prefix", "raw"),
        default="prefix",
        help="each line with its rank in front (default), or as it comes",
    )
    add("--log-dir", type=Path, metavar="DIR", help="also write DIR/rank<r>.log")
    add(
        "--torch-env",
        action="store_true",
        help="also set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun does. Not "
        "for Hugging Face: Accelerate would take the job for plain data parallelism",
    )
    add(
        "--sm-dir",
        type=Path,
        default=Path("sagemaker"),
        metavar="DIR",
        help="with --config: where SM_MODEL_DIR and the like are, unless they are set (sagemaker)",
    )
    add("-m", "--module", action="store_true", help="SCRIPT is a module")
    add("script", metavar="SCRIPT")
    add("args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Runs the job; returns the exit status."""
    base = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    if arguments.config is not None:
        try:
            base |= variables(read_config(arguments.config), base, arguments.sm_dir.absolute())
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        for name in ("SM_MODEL_DIR", "SM_OUTPUT_DATA_DIR"):
            Path(base[name]).mkdir(parents=True, exist_ok=True)
    module = ["-m"] if arguments.module else []
    job = Job(
        command=[sys.executable, *module, arguments.script, *arguments.args],
        num_ranks=arguments.ranks,
        environment=lambda rank, attempt: rank_environment(
            base, rank, arguments.ranks, attempt, torch_env=arguments.torch_env
        ),
        output=Output(prefix=arguments.output == "prefix", folder=arguments.log_dir),
        max_restarts=arguments.max_restarts,
        grace_s=arguments.grace_s,
    )
    return run_job(job)


def rank_environment(
    base: Mapping[str, str], rank: int, size: int, attempt: Attempt, *, torch_env: bool
) -> dict[str, str]:
    """Environment of one rank.

    Args:
        base: what all ranks have.
        rank: of the process.
        size: number of ranks.
        attempt: how often all have been started, and the folder of this time.
        torch_env: set torchrun's variables, too.
    """
    env = {
        **base,
        "SMP_RANK": str(rank),
        "SMP_WORLD_SIZE": str(size),
        "SMP_RENDEZVOUS": f"file://{attempt.folder}/rendezvous",
        "SMP_RESTART_COUNT": str(attempt.index),
        "SMP_FAILURE_FILE": str(attempt.failure_file(rank)),
    }
    # Several ranks that each use all cores are slower than with one thread each.
    env.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // size)))
    env.setdefault("PYTHONUNBUFFERED", "1")
    # For what scripts do with torch.distributed themselves; smp meets in a file.
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    env.setdefault("MASTER_PORT", str(attempt.port))
    if torch_env:
        env |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
        env |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    return env


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number > 0")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 0")
    return int(text)
