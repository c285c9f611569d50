"""The stubs of the extension name what it has: written by hand, because generated ones lose which
arguments may be None and what lists hold, so they are held against the extension here."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import smp
from smp import _C

STUBS = sorted(Path(smp.__file__).parent.glob("_C*.pyi"))


def _declared() -> dict[str, ast.stmt]:
    """Top-level names of the stubs, those of `_C.pyi` and of its parts."""
    found: dict[str, ast.stmt] = {}
    for stub in STUBS:
        for node in ast.parse(stub.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                found[node.name] = node
    return found


DECLARED = _declared()
CLASSES = sorted(name for name, node in DECLARED.items() if isinstance(node, ast.ClassDef))


def _public(owner: Any) -> set[str]:
    return {name for name in vars(owner) if not name.startswith("_")}


def _members(node: ast.ClassDef) -> dict[str, ast.stmt]:
    members: dict[str, ast.stmt] = {}
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            members[item.name] = item
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            members[item.target.id] = item
    return members


def _names_in_text(doc: str) -> list[str] | None:
    """Argument names in a signature as pybind11 writes it; None where it gives none."""
    match = re.match(r"\w+\((.*)\) -> ", doc.splitlines()[0]) if doc else None
    if match is None:
        return None
    names, depth, start = [], 0, 0
    for position, char in enumerate(match[1] + ","):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            names.append(match[1][start:position].split(":")[0].strip())
            start = position + 1
    return [name for name in names if name not in ("self", "*", "")]


def _names_in_stub(node: ast.FunctionDef) -> list[str] | None:
    arguments = node.args
    if arguments.kwarg is not None:
        return None
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument.arg for argument in every if argument.arg != "self"]


def _complaint(what: str, function: Any, node: ast.FunctionDef) -> str | None:
    wanted = _names_in_text(function.__doc__ or "")
    named = wanted is not None and not any(re.fullmatch(r"arg\d+", name) for name in wanted)
    stub = _names_in_stub(node)
    if (
        wanted is None
        or stub is None
        or (named and stub == wanted)
        or (not named and len(stub) == len(wanted))
    ):
        return None
    return f"{what}: the extension takes {wanted}, the stub says {stub}"


def test_the_stubs_have_the_names_of_the_extension() -> None:
    assert len(CLASSES) > 30
    aliases = {name for name in _public(_C) if not hasattr(getattr(_C, name), "__module__")}
    assert set(DECLARED) - _public(_C) == set()
    assert _public(_C) - aliases - set(DECLARED) == set()


@pytest.mark.parametrize("name", CLASSES)
def test_classes_have_the_members_of_their_stubs(name: str) -> None:
    cls, node = getattr(_C, name), DECLARED[name]
    assert isinstance(node, ast.ClassDef)
    members = _members(node)
    of_enums = {"name", "value"} if hasattr(cls, "__members__") else set()
    assert {m for m in members if not m.startswith("_")} - of_enums == _public(cls) - of_enums
    complaints = [
        _complaint(f"{name}.{key}", vars(cls)[key], member)
        for key, member in members.items()
        if isinstance(member, ast.FunctionDef) and not member.decorator_list
        if key in vars(cls) and (key == "__init__" or not key.startswith("_"))
    ]
    assert [c for c in complaints if c is not None] == []


def test_functions_have_the_arguments_of_their_stubs() -> None:
    complaints = [
        _complaint(name, getattr(_C, name), node)
        for name, node in DECLARED.items()
        if isinstance(node, ast.FunctionDef)
    ]
    assert [c for c in complaints if c is not None] == []
