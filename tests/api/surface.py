"""Writes down the public surface of smp: names, signatures, config keys, defaults.

``python -m tests.api.surface`` prints it as JSON; with ``--write`` it becomes
the golden file that `test_surface.py` compares with. A change of the golden file
is a change of the interface and belongs into CHANGELOG.md.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import sys
import types
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).with_name("golden.json")
CLASSES = ("DistributedModel", "DistributedOptimizer", "StepOutput")


def describe_default(value: Any) -> Any:
    """A default as JSON, by name where it is no plain value."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, tuple | list):
        return [describe_default(item) for item in value]
    return f"<{type(value).__name__}>"


def describe_signature(function: Any) -> list[Any] | str:
    """Parameters as ``name`` or ``[name, default]``, with stars and markers."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "no signature"
    described: list[Any] = []
    for p in parameters:
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        marker = " (keyword only)" if p.kind is p.KEYWORD_ONLY else ""
        name = f"{star}{p.name}{marker}"
        described.append(name if p.default is p.empty else [name, describe_default(p.default)])
    return described


def describe(value: Any) -> Any:
    if isinstance(value, types.ModuleType):
        return {"module": sorted(getattr(value, "__all__", []))}
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return {"enum": [member.name for member in value]}
    if isinstance(value, enum.Enum):
        return {"value": f"{type(value).__name__}.{value.name}"}
    if isinstance(value, type):
        members: dict[str, Any] = {}
        for name, member in sorted(vars(value).items()):
            if name.startswith("_") and name not in ("_register_comm_hook",):
                continue
            plain = inspect.unwrap(getattr(member, "__func__", member))
            members[name] = "property" if isinstance(member, property) else (
                describe_signature(plain) if callable(plain) else "attribute"
            )  # fmt: skip
        return {"class": describe_signature(value), "members": members}
    if callable(value):
        return {"function": describe_signature(value)}
    return {"object": type(value).__name__}


def surface() -> dict[str, Any]:
    """The whole surface as JSON-able data."""
    import smp
    from smp.config.schema import Config

    names = sorted(smp.__all__)
    config = {}
    for item in dataclasses.fields(Config):
        if item.default is not dataclasses.MISSING:
            config[item.name] = describe_default(item.default)
        elif item.default_factory is not dataclasses.MISSING:
            config[item.name] = describe_default(item.default_factory())
        else:
            config[item.name] = "required"
    return {
        "names": {name: describe(getattr(smp, name)) for name in names},
        "config": config,
    }


def main() -> None:
    text = json.dumps(surface(), indent=1, sort_keys=True) + "\n"
    if "--write" in sys.argv:
        GOLDEN.write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
