"""The tables that programs rely on: exit statuses, and the fields of events and of the manifest."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from smp_cli.main import COMMANDS, main
from smp_cli.remote import LOST
from smp_cli.supervisor import EXIT_NOT_STARTED, EXIT_RESUME, Failure

from smp.commands import ending
from smp.world import events, fault_injection, preemption
from tests.docs.pages import REPO

PAGE = REPO / "docs" / "orchestrators.md"
PYTHON = REPO / "python"
#: Statuses that have a name in the sources.
NAMED = {
    "DONE": ending.DONE,
    "NO": ending.NO,
    "BAD_USE": ending.BAD_USE,
    "EXIT_RESUME": EXIT_RESUME,
    "EXIT_NOT_STARTED": EXIT_NOT_STARTED,
    "self.code": fault_injection.InjectedFault.code,
    "status": 1,  # of `exit_if_left_behind`, whose calls give it
}
#: Exceptions that `smp.commands.ending.guarded` turns into a status.
RAISED = {"BadUse": ending.BAD_USE, "DoesNotFit": ending.NO}
ENDS = {"exit", "_exit", "SystemExit"}


def documented_statuses() -> dict[str, set[str]]:
    text = (REPO / "docs" / "running_reference.md").read_text()
    section = text.split("\n## Exit statuses\n")[1].split("\n## ")[0]
    result: dict[str, set[str]] = {}
    program = ""
    for name, status in re.findall(r"^\| *(.*?) *\| ([^|]+?) \|", section, re.M)[1:]:
        program = name.strip("`") or program
        assert status not in result.setdefault(program, set()), (program, status)
        result[program].add(status)
    return result


def values_of(value: ast.expr | None) -> Iterator[int]:
    """Yields the statuses that an expression names."""
    if isinstance(value, ast.IfExp):
        yield from values_of(value.body)
        yield from values_of(value.orelse)
    elif isinstance(value, ast.Constant) and isinstance(value.value, int):
        yield value.value
    elif value is not None and ast.unparse(value) in NAMED:
        yield NAMED[ast.unparse(value)]
    elif isinstance(value, ast.Call) and ast.unparse(value).startswith("int(any("):
        yield from (0, 1)


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def returned(path: Path) -> Iterator[int]:
    """Yields the statuses that functions of a file return, or raise for `guarded`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and ast.unparse(node.returns or node) == "int":
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return):
                    yield from values_of(inner.value)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from {RAISED[n] for n in [name_of(node.exc)] if n in RAISED}


def ended(path: Path) -> Iterator[int]:
    """Yields the statuses with which a file of the library ends its process."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and name_of(node) in ENDS and node.args:
            found = list(values_of(node.args[0]))
            assert found, f"{path}: {ast.unparse(node)}"
            yield from found


def files_of(program: str) -> list[Path]:
    """Files that decide on the status of a command."""
    module = next(c.module for c in COMMANDS if f"smp {c.name}" == program).replace(".", "/")
    folder = PYTHON / module
    files = sorted(folder.glob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    if program == "smp run":
        files.append(PYTHON / "smp_cli" / "supervisor.py")
    # Functions that `smp verify` calls count batches and updates.
    return [path for path in files if path.name != "records.py"]


@pytest.mark.parametrize("program", [f"smp {command.name}" for command in COMMANDS])
def test_statuses_of_commands_are_those_of_the_sources(program: str) -> None:
    found = {ending.DONE, ending.BAD_USE}  # argparse ends with the second
    for path in files_of(program):
        found.update(returned(path))
    more = set()
    if program == "smp run":
        found |= {EXIT_RESUME, LOST}
        assert Failure(0, -9).exit_status == 128 + 9 and Failure(0, 7).exit_status == 7
        more = {"128 + n", "n"}
    assert documented_statuses()[program] == {*map(str, found), *more}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_wrong_option_ends_every_command_with_one_status(
    command: object, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([command.name, "--no-such-option"])  # type: ignore[attr-defined]
    assert end.value.code == ending.BAD_USE
    assert "usage: smp" in capsys.readouterr().err


def test_statuses_of_ranks_are_those_of_the_sources() -> None:
    tools = {PYTHON / "smp" / name for name in ("commands", "__main__.py")}
    found = {1}  # of the interpreter, after an exception
    for path in (PYTHON / "smp").rglob("*.py"):
        if not tools & {path, *path.parents}:
            found.update(ended(path))
    files = [p for p in (REPO / "csrc").rglob("*") if p.suffix in {".h", ".cpp"}]
    core = [path.read_text() for path in files]
    found.update(int(status) for text in core for status in re.findall(r"\b_exit\((\d+)\)", text))
    assert preemption.EXIT_RESUME == EXIT_RESUME
    assert documented_statuses()["a rank"] == {*map(str, found), "n"}


def test_every_program_is_in_the_table() -> None:
    programs = {*(f"smp {command.name}" for command in COMMANDS), "a rank"}
    assert documented_statuses().keys() == programs


def test_fields_of_events_are_documented() -> None:
    section = PAGE.read_text().split("\n## Event file\n")[1].split("\n## ")[0]
    table = section.split("| event | when |")[1]
    documented: dict[str, list[str]] = {}
    name = ""
    for event, field in re.findall(r"^\| `?(\w*)`? *\| .*?\| `(\w+)` \|", table, re.M):
        name = event or name
        documented.setdefault(name, []).append(field)
    expected = {e.NAME: [f.name for f in dataclasses.fields(e)] for e in events.EVENTS}
    assert documented == expected
