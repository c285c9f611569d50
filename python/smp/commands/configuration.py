"""Reads the configuration of a run from a command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from smp_cli.sagemaker import CONFIG_FORM, split_config

from smp.commands.ending import BadUse
from smp.config.schema import Config, check_world, normalize
from smp.config.sources import read_user_config


@dataclass(frozen=True)
class Configuration:
    """A configuration as it was given, and as it is understood.

    Attributes:
        given: keys that were set.
        config: configuration with the defaults of the other keys.
        num_ranks: number of processes.
    """

    given: dict[str, Any]
    config: Config
    num_ranks: int


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Adds ``--config`` and ``--processes``."""
    parser.add_argument(
        "--config",
        metavar=CONFIG_FORM,
        help="configuration of smp.init: JSON or YAML files and single keys, later ones win",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="of the run; default: the fewest that the degrees need",
    )


def read_configuration(arguments: argparse.Namespace) -> Configuration:
    """Reads the options of `add_configuration`. ``ddp`` is set by default.

    Raises:
        BadUse: there is an unknown key, a bad value, a file that cannot be read, or degrees that
            do not divide the number of processes.
    """
    try:
        given = _given(arguments.config)
        config = Config.from_dict({"ddp": True, **given})
        fewest = (
            config.pipeline_parallel_degree
            * config.tensor_parallel_degree
            * config.sharded_data_parallel_degree
        )
        num_ranks = fewest if arguments.processes is None else arguments.processes
        if num_ranks < 1:
            raise BadUse(f"--processes must be at least 1, got {num_ranks}")
        check_world(config, num_ranks)
    except ValueError as error:
        raise BadUse(str(error)) from None
    return Configuration(given, config, num_ranks)


def _given(text: str | None) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for word in [] if text is None else split_config(text):
        key, separator, value = word.partition("=")
        read = normalize({key: value}, from_text=True) if separator else read_user_config(word)
        given |= read.values
    return given
