"""Makes the variables in which SageMaker passes configuration and folders to a job."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_DEGREE_NAMES = ("pipeline_parallel_degree", "partitions")
_WORDS = {"true": True, "false": False, "none": None}


#: Form of ``--config`` of all subcommands.
CONFIG_FORM = "FILE|KEY=VALUE,..."


def read_config(text: str) -> dict[str, Any]:
    """Returns the configuration that a command line gives, with both names of the degree.

    Args:
        text: JSON or YAML files and ``key=value``, separated by commas; later ones win.

    Raises:
        ValueError: a word is neither a file nor ``key=value``, or a file cannot be read.
    """
    values: dict[str, Any] = {}
    for word in split_config(text):
        key, equals, value = (part.strip() for part in word.partition("="))
        values |= {key: _value(value)} if equals else _read_file(word)
    return _with_both_names(values)


def split_config(text: str) -> list[str]:
    """Splits text at commas outside brackets, which values may have.

    Raises:
        ValueError: a word is empty, or has no key.
    """
    words = re.split(r",(?![^\[{]*[\]}])", text)
    for word in words:
        if not word.partition("=")[0].strip():
            raise ValueError(
                f"smp config: {word!r} in {text!r} is neither a file nor key=value; write "
                f"--config {CONFIG_FORM}, with commas and no spaces between"
            )
    return [word.strip() for word in words]


def _read_file(path: str) -> dict[str, Any]:
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(
            f"smp config: expected a regular file, {path!r} is something else; write the "
            "configuration to a file"
        )
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = _parsed(text, is_yaml=path.endswith((".yaml", ".yml")))
    except RecursionError:
        raise ValueError(f"smp config: {path} is nested too deeply; correct it") from None
    except OSError as error:
        raise ValueError(
            f"smp config: cannot read {path!r}: {error.strerror}; write --config {CONFIG_FORM}"
        ) from None
    except ValueError as error:
        raise ValueError(f"smp config: {path} cannot be read: {error}; correct it") from None
    if not isinstance(values, dict):
        raise ValueError(f"smp config: {path} holds a {type(values).__name__}; write an object")
    return values


def _parsed(text: str, is_yaml: bool) -> Any:
    if not is_yaml:
        return json.loads(text)
    yaml = importlib.import_module("yaml")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _value(text: str) -> Any:
    """Parses ``"True"``, ``"4"`` and ``"5e8"``; other words stay text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _with_both_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sets both names of the degree: Hugging Face reads ``partitions``, newer scripts the other."""
    given = {name: values[name] for name in _DEGREE_NAMES if name in values}
    if len({str(value) for value in given.values()}) > 1:
        raise ValueError(
            f"smp config: partitions={given['partitions']}: pipeline_parallel_degree="
            f"{given['pipeline_parallel_degree']} means the same and differs; give one of them"
        )
    degree = next(iter(given.values()), 1)
    return {**values, **dict.fromkeys(_DEGREE_NAMES, degree)}


def variables(config: Mapping[str, Any], env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Returns the environment variables of a job on SageMaker.

    Args:
        config: configuration of `read_config`.
        env: environment of the launcher; paths that are set there are kept.
        folder: folder that contains the default folders.
    """
    defaults = {
        "SM_CURRENT_HOST": "localhost",
        "SM_HOSTS": '["localhost"]',
        "SM_NUM_GPUS": str(count_gpus(env)),
        "SM_MODULE_DIR": os.getcwd(),
        "SM_MODEL_DIR": str(folder / "model"),
        "SM_OUTPUT_DATA_DIR": str(folder / "output"),
        "SM_CHANNEL_TRAIN": str(folder / "train"),
        "SM_CHANNEL_TEST": str(folder / "test"),
        "SAGEMAKER_JOB_NAME": "local",
    }
    return {
        **{name: value for name, value in defaults.items() if name not in env},
        "SM_HP_MP_PARAMETERS": json.dumps(dict(config), sort_keys=True),
        "SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_mpi_enabled": True}),
    }


def count_gpus(env: Mapping[str, str], driver: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """Counts the GPUs that processes with this environment see, by the driver's files."""
    try:
        there = len(list(driver.iterdir()))
    except OSError:
        there = 0
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    return min(there, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
