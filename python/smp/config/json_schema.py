"""Describes the configuration to editors and other programs: a JSON Schema of all keys."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from smp.config import schema
from smp.config.schema import ALIASES, DEFAULTS, KINDS


def json_schema() -> dict[str, Any]:
    """Returns a JSON Schema (draft 2020-12) of configuration files.

    It describes keys one by one. Rules between keys, and those of the number of processes, are
    checked by `smp config check`.
    """
    texts = descriptions()
    keys = {name: _property(name) | {"description": texts[name]} for name in KINDS}
    for alias, name in ALIASES.items():
        keys[alias] = _property(name) | {"description": f"Alias of `{name}`.", "deprecated": True}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of smp",
        "type": "object",
        "properties": keys,
        "patternProperties": {"^_": {}},  # private keys of other versions are ignored
        "additionalProperties": False,
    }


def _property(name: str) -> dict[str, Any]:
    kind = KINDS[name]
    form = {"anyOf": [dict(kind.form), {"type": "null"}]} if kind.optional else dict(kind.form)
    return {**form, "default": DEFAULTS[name]}


def descriptions() -> dict[str, str]:
    """Returns the text below each key in the source of `Config`."""
    (tree,) = ast.parse(inspect.getsource(schema.Config)).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = below.value.value if isinstance(below, ast.Expr) else None  # type: ignore[attr-defined]
            assert isinstance(text, str), f"'{statement.target.id}' has no text below it"
            found[statement.target.id] = " ".join(text.split())
    return found
