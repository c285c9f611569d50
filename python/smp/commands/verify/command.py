"""Defines the arguments of the command, and prints its results."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from smp_cli.sagemaker import CONFIG_FORM, read_config

from smp.commands.ending import DONE, NO, BadUse, guarded
from smp.commands.printing import print_json
from smp.commands.report import Table, Text, print_blocks
from smp.commands.verify.checking import Check
from smp.commands.verify.compare import Verdict
from smp.commands.verify.jobs import Script, ScriptFailed
from smp.commands.verify.layouts import ALL, parse_layouts

#: Everything after this separator is passed to the script.
SEPARATOR = "--"
_KINDS = ("output", "gradient", "parameter", "optimizer")
_EXAMPLES = """\
examples:
  smp verify train.py
  smp verify --layouts pp2,dp2,pp2tp2 --steps 2 train.py --batch-size 8
  smp verify train.py --batch-size 8 --layouts all
  smp verify train.py --layouts all -- --steps 1000
  smp verify --layouts all --json -m package.train
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand ``verify``."""
    parser = subparsers.add_parser(
        "verify",
        help="compare a training script in small layouts with one process",
        description="Runs the script in one process and in small layouts of this machine (on the "
        "CPU), and compares results, gradients, parameters and optimizer state. The exit status is "
        "0 if all that differs is rounding, 1 if not, 2 if the script fails in one process.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_options(parser)
    add = parser.add_argument
    add("-m", "--module", action="store_true", help="SCRIPT is a module")
    add("script", metavar="SCRIPT")
    add(
        "args",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="arguments of the script; options above are taken here as well, but behind '--'",
    )
    parser.set_defaults(execute=guarded("verify", execute))


def execute(arguments: argparse.Namespace) -> int:
    """Runs and judges all layouts; returns the exit status."""
    divided = divide(arguments.args, arguments)
    vars(arguments).update(divided.options)
    if divided.options and SEPARATOR not in arguments.args:
        script, flags = arguments.script, [_flag(name) for name in divided.options]
        _say(
            f"{' and '.join(flags)} behind {script!r}: taken by smp verify; options of the script "
            f"go behind '{SEPARATOR}' ({script} ... {SEPARATOR} {flags[0]} ...)"
        )
    layouts = parse_layouts(arguments.layouts)
    if arguments.steps < 1:
        raise BadUse(f"--steps {arguments.steps} is no whole number > 0")
    if not arguments.timeout_s > 0:
        raise BadUse(f"--timeout-s {arguments.timeout_s:g} is no number of seconds > 0")
    if not arguments.module and not Path(arguments.script).is_file():
        raise BadUse(f"there is no script {arguments.script!r}; give its path, or -m and a module")
    try:
        config = {} if arguments.config is None else read_config(arguments.config)
    except ValueError as error:
        raise BadUse(str(error)) from None
    for alias in ("partitions", "pipeline_parallel_degree"):  # a layout sets it
        config.pop(alias, None)
    folder = _folder(arguments.keep)
    module = ("-m",) if arguments.module else ()
    command = (*module, arguments.script, *divided.script)
    script = Script(command, config, arguments.steps, folder, arguments.timeout_s)
    try:
        check = Check(script, _say)
        try:
            check.begin()
        except ScriptFailed as failed:
            print(failed.output, file=sys.stderr)
            raise BadUse(f"the script fails in one process already: {failed}") from None
        verdicts = [check.layout(layout) for layout in layouts]
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        print_json({"layouts": [asdict(verdict) for verdict in verdicts]})
    else:
        _print(verdicts, arguments.steps)
    return DONE if all(verdict.is_good for verdict in verdicts) else NO


def _folder(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="smp-verify-"))
    if keep.exists() and any(keep.iterdir()):
        raise BadUse(f"--keep: {str(keep)!r} is not empty; name a new folder")
    keep.mkdir(parents=True, exist_ok=True)
    return keep.absolute()


def _say(text: str) -> None:
    print(f"smp verify: {text}", file=sys.stderr, flush=True)


def _print(verdicts: list[Verdict], steps: int) -> None:
    rows = [
        [
            verdict.layout,
            verdict.answer,
            *(_share(verdict.largest.get(kind)) for kind in _KINDS),
            _share(max(verdict.exact.values(), default=None)),
        ]
        for verdict in verdicts
    ]
    columns = ("layout", "answer", "outputs", "gradients", "changes", "optimizer", "exact")
    title = f"Largest differences from one process in {steps} updates"
    print_blocks([Text(title), Table(columns, rows, text_columns=2)])
    for verdict in verdicts:
        if verdict.text:
            print(f"\n{verdict.layout}: {verdict.text}")
        for hint in verdict.hints:
            print(f"  {hint}")
        for note in verdict.notes:
            print(f"  note: {note}")


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1e}"


# ---- options on both sides of the script's name


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that are allowed in front of the script's name and behind it."""
    add = parser.add_argument
    add("--layouts", default="pp2,dp2", help=f"all ({','.join(ALL)}) or some (pp2,dp2)")
    add("--steps", type=int, default=3, metavar="N", help="updates of the optimizer (3)")
    add("--config", metavar=CONFIG_FORM, help="configuration, as smp run takes it")
    add("--timeout-s", type=float, default=600.0, metavar="S", help="of each run (600)")
    add("--keep", type=Path, metavar="DIR", help="keep records and output of all runs there")
    add("--json", action="store_true", help="one JSON document instead of a table")


class SplitWords(NamedTuple):
    """The words behind the script's name.

    Attributes:
        options: values of the options of `smp verify` among them, by attribute.
        script: arguments of the script.
    """

    options: dict[str, Any]
    script: tuple[str, ...]


def divide(words: Sequence[str], before: argparse.Namespace) -> SplitWords:
    """Divides the words behind the script's name.

    Without a separator, options of `smp verify` are taken wherever they are, and all other words
    are arguments of the script. With a separator, arguments of the script have to be behind it.

    Args:
        words: words behind the script's name.
        before: parsed arguments in front of it.

    Raises:
        BadUse: an option has no value, or a value of the wrong kind, or is in front of the script's
            name as well; or a word in front of the separator is not an option.
    """
    parser = _Options(add_help=False, allow_abbrev=False)
    _add_options(parser)
    defaults = {action.dest: action.default for action in parser._actions}
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    has_separator = SEPARATOR in words
    end = list(words).index(SEPARATOR) if has_separator else len(words)
    found, others = parser.parse_known_args(list(words[:end]))
    if has_separator and others:
        raise BadUse(
            f"{others[0]!r} between the script and '{SEPARATOR}' is no option of smp verify; "
            f"arguments of the script go behind '{SEPARATOR}'"
        )
    for name in vars(found):
        if getattr(before, name) != defaults[name]:
            raise BadUse(
                f"{_flag(name)} is in front of the script's name and behind it; give it once, and "
                f"if the second is for the script, behind '{SEPARATOR}'"
            )
    return SplitWords(vars(found), (*others, *words[end + 1 :]))


class _Options(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadUse(
            f"behind the script's name: {message}; what is for the script goes behind '{SEPARATOR}'"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
