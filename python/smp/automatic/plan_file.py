"""Writes a choice to a file, and reads it again."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from typing import Any

from smp.automatic.choosing import Choice, Request
from smp.commands.printing import bytes_text
from smp.config import given_files
from smp.config.schema import Config

_FORMAT = 2


def write(path: str, choice: Choice) -> None:
    """Writes a choice in one step."""
    text = json.dumps({"smp.auto": _FORMAT, **asdict(choice)}, indent=2)
    beside = f"{path}.{os.getpid()}"
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text + "\n")
    os.replace(beside, path)


def read(path: str) -> Choice:
    """Reads a choice.

    Raises:
        ValueError: there is no such file, or it holds no choice.
    """
    try:
        values: dict[str, Any] = given_files.parse_json(given_files.read_text(path))
        if not isinstance(values, dict) or values.pop("smp.auto", None) != _FORMAT:
            raise ValueError("the key smp.auto is missing, or has another number")
        choice = Choice(**{field.name: values[field.name] for field in fields(Choice)})
        if not (isinstance(choice.config, dict) and choice.plan["ranks"]):
            raise ValueError("there is no plan in it")
    except OSError as error:
        raise ValueError(f"plan={path!r} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"plan={path!r} was not written by smp.auto: {error}") from None
    return choice


def check(choice: Choice, path: str, name: str, request: Request, num_ranks: int) -> None:
    """Checks that a choice was made for this run.

    Raises:
        ValueError: it was made for another one; the text has the difference.
    """
    own = {
        "model": name,
        "num_ranks": num_ranks,
        "batch": request.batch,
        "seq": request.seq,
        "precision": request.precision,
    }
    for key, value in own.items():
        found = getattr(choice, key)
        if found != value:
            raise ValueError(
                f"plan={path!r} was made for {key}={found!r}, and this run has {value!r}; leave "
                "plan= out to look again"
            )
    with_keys = Config.from_dict({**choice.config, **request.config})
    if with_keys != Config.from_dict(choice.config):
        raise ValueError(
            f"plan={path!r} was made without {dict(request.config)} of config=; leave "
            "one of the two out"
        )
    needed = choice.plan["peak_bytes"]
    if request.memory_bytes is not None and needed > request.memory_bytes:
        raise ValueError(
            f"plan={path!r} needs {bytes_text(needed)}, more than memory=; leave plan= out to look "
            "again"
        )
