"""``smp config``: describes the keys of the configuration, and checks and shows a file of them."""

from __future__ import annotations

import argparse
import os
from typing import Any

from smp.commands.ending import DONE, BadUse, DoesNotFit, guarded
from smp.commands.printing import print_json
from smp.config.json_schema import json_schema
from smp.config.processes import advice, check_world
from smp.config.schema import Config
from smp.config.sources import (
    LAUNCHER_VARIABLE,
    merge_sources,
    read_launcher_config,
    read_user_config,
)


def add_parser(subparsers: Any) -> None:
    """Adds the command ``config``. Exit status 1: the configuration is wrong; 2: bad use."""
    parser = subparsers.add_parser(
        "config",
        help="the keys of the configuration, and a check of a file",
        description="Describes and checks configurations as smp.init does, without a training run. "
        f"Values of {LAUNCHER_VARIABLE} win over those of the file.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("schema", help="print a JSON Schema of the keys, for editors").set_defaults(
        execute=guarded("config", _schema)
    )
    for name, text, run in (
        ("check", "say whether smp.init would accept it", _check),
        ("show", "print the value of every key", _show),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("file", nargs="?", help="JSON or YAML file; else the launcher's keys")
        action.add_argument(
            "--processes",
            type=int,
            metavar="N",
            help="number of processes; without it rules that need it are not checked",
        )
        action.set_defaults(execute=guarded("config", run))
    actions.choices["show"].add_argument(
        "--json", action="store_true", help="print all keys as a JSON object"
    )


def _schema(arguments: argparse.Namespace) -> int:
    print_json(json_schema())
    return DONE


def _read(arguments: argparse.Namespace) -> tuple[Config, dict[str, Any], list[str]]:
    """Returns the effective configuration, the keys that are given, and notes.

    Raises:
        BadUse: there is nothing to read.
        DoesNotFit: the configuration is wrong.
    """
    if arguments.processes is not None and arguments.processes < 1:
        raise BadUse(f"--processes {arguments.processes}: expected a number of 1 or more")
    if arguments.file is None and not os.environ.get(LAUNCHER_VARIABLE, "").strip():
        raise BadUse(f"nothing to read: give a JSON or YAML file, or set {LAUNCHER_VARIABLE}")
    try:
        given = merge_sources(read_launcher_config(os.environ), read_user_config(arguments.file))
        config = Config.of_checked(given.values)
        if arguments.processes is not None:
            check_world(config, arguments.processes)
    except ValueError as error:
        raise DoesNotFit(str(error).removeprefix("smp config: ")) from None
    return config, given.values, [*given.notes, *advice(config)]


def _check(arguments: argparse.Namespace) -> int:
    _, given, notes = _read(arguments)
    for note in notes:
        print(note)
    number = "any number of processes" if arguments.processes is None else arguments.processes
    print(f"{len(given)} keys are valid; checked for {number}")
    return DONE


def _show(arguments: argparse.Namespace) -> int:
    config, given, notes = _read(arguments)
    values = config.to_dict()
    if arguments.json:
        print_json(values)
        return DONE
    for note in notes:
        print(note)
    width = max(map(len, values))
    for name, value in values.items():
        print(f"{name:{width}}  {value!r}{'' if name in given else '  (default)'}")
    return DONE
