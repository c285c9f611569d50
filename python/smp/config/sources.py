"""The sources of configuration values: launcher, dict, file; and their agreement.

Values of the launcher replace those of the script, per key; defaults fill the rest.
All functions are pure, except those that read the configuration file.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smp.config import given_files
from smp.config.processes import advice, check_world
from smp.config.schema import CheckedConfig, Config, normalize
from smp.config.typed import ConfigDict

LAUNCHER_VARIABLE = "SM_HP_MP_PARAMETERS"

UserConfig = ConfigDict | Mapping[str, object] | str | os.PathLike[str] | None


def read_user_config(config: UserConfig) -> CheckedConfig:
    """Returns the values of the argument of `smp.init`.

    Args:
        config: dict, path of a ``.json``, ``.yaml`` or ``.yml`` file, or None.

    Raises:
        ValueError: the same as for `normalize`, or the file cannot be read.
    """
    if config is None:
        return CheckedConfig({}, [])
    if isinstance(config, Mapping):
        return normalize(config)
    if not isinstance(config, str | os.PathLike):
        raise ValueError(
            f"smp config: expected a dict or the path of a JSON or YAML file, "
            f"got {type(config).__name__}; pass one of these or nothing"
        )
    path = os.fspath(config)
    try:
        text = given_files.read_text(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"smp config: {path} is not text in UTF-8: {error}") from None
    except OSError as error:
        raise ValueError(
            f"smp config: cannot read {path!r}: {error.strerror}; "
            "pass the path of a JSON or YAML file"
        ) from None
    return normalize(_parse_file(text, path), from_text=True)


def read_launcher_config(env: Mapping[str, str]) -> CheckedConfig:
    """Returns the values of `SM_HP_MP_PARAMETERS`: a JSON object or ``key=value,...``."""
    text = env.get(LAUNCHER_VARIABLE, "").strip()
    if not text:
        return CheckedConfig({}, [])
    if text[0] in "{[":
        return normalize(_parse_json(text, LAUNCHER_VARIABLE), from_text=True)
    pairs = (part.partition("=") for part in text.split(",") if part.strip())
    return normalize({key.strip(): value for key, _, value in pairs}, from_text=True)


def merge_sources(launcher: CheckedConfig, user: CheckedConfig) -> CheckedConfig:
    """Merges launcher over user, per key, with a note for each key where they differ."""
    replaced = [
        f"smp config: {key}={launcher.values[key]!r} from the launcher replaces {value!r}"
        for key, value in user.values.items()
        if key in launcher.values and launcher.values[key] != value
    ]
    return CheckedConfig(
        {**user.values, **launcher.values}, [*launcher.notes, *user.notes, *replaced]
    )


@dataclass(frozen=True)
class ReadConfig:
    """The configuration of this rank before it is compared with the other ranks'."""

    given: dict[str, Any]
    notes: list[str]
    config: Config | None
    error: str | None

    def config_dict(self) -> dict[str, Any] | None:
        return None if self.config is None else self.config.to_dict()


def read_config(
    config: UserConfig, base: Mapping[str, Any], env: Mapping[str, str], world_size: int
) -> ReadConfig:
    """Returns the effective configuration, or its error.

    Args:
        config: argument of `init`.
        base: checked values of an earlier init, which `config` adds to.
        env: environment variables; the launcher's values win.
        world_size: number of processes.
    """
    try:
        given = read_user_config(config)
        if LAUNCHER_VARIABLE in env:
            given = merge_sources(read_launcher_config(env), given)
        values = {**base, **given.values}
        effective = Config.of_checked(values)
        check_world(effective, world_size)
    except ValueError as error:
        return ReadConfig({}, [], None, str(error))
    return ReadConfig(values, given.notes + advice(effective), effective, None)


def _parse_file(text: str, path: str) -> dict[str, object]:
    suffix = os.path.splitext(path)[1].lower()
    if suffix == ".json":
        return _parse_json(text, path)
    if suffix not in (".yaml", ".yml"):
        raise ValueError(f"smp config: {path!r} is neither .json, .yaml nor .yml; rename it")
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise ValueError(
            f"smp config: reading {path!r} needs the package PyYAML; install it or use JSON"
        ) from None
    try:
        value = given_files.load_yaml(text, yaml)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"smp config: {path} is not valid YAML: {error}") from None
    return _as_mapping(value, path)


def _parse_json(text: str, source: str) -> dict[str, object]:
    try:
        value = given_files.parse_json(text)
    except ValueError as error:
        raise ValueError(f"smp config: {source} is not valid JSON: {error}") from None
    return _as_mapping(value, source)


def _as_mapping(value: object, source: str) -> dict[str, object]:
    if value is None:
        return {}  # an empty YAML file
    if not isinstance(value, dict):
        raise ValueError(
            f"smp config: {source} holds a {type(value).__name__}; write key: value pairs"
        )
    return value


def compare_configs(configs: Sequence[Mapping[str, Any]]) -> None:
    """Checks that all ranks have the same configuration.

    Args:
        configs: effective configurations by global rank.

    Raises:
        ValueError: ranks differ; the text names keys, values and ranks, and is
            the same for the same list.
    """
    lines = []
    for key in configs[0]:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, config in enumerate(configs):
            ranks_by_value.setdefault(repr(config.get(key)), []).append(rank)
        if len(ranks_by_value) > 1:
            parts = [f"{value} on ranks {ranks}" for value, ranks in ranks_by_value.items()]
            lines.append(f"{key} is " + ", ".join(parts))
    if lines:
        raise ValueError(
            "smp config: the ranks disagree: "
            + "; ".join(lines)
            + "; pass the same configuration to smp.init on every rank"
        )
