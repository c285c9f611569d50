"""`smp config`, and what editors read: the JSON Schema and the types of the keys."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from smp_cli.main import main

from smp.config.json_schema import json_schema
from smp.config.schema import ALIASES, DEFAULTS, KINDS, Config, normalize
from smp.config.sources import LAUNCHER_VARIABLE
from smp.config.typed import ConfigDict

VALUES = [True, 0, 1, 3, -1, 2.5, "", "speed", "simple", "12GiB", "1:2, 2.5", [1.0, 2.0], [], None]
SCHEMA = json_schema()
#: Texts that no schema tells from others: sizes, and lists of sizes or speeds.
TEXTS = ("partition_memory_limit", "device_speeds")


def test_the_schema_is_one_and_has_all_keys() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"].keys() == KINDS.keys() | ALIASES.keys()
    for name, key in SCHEMA["properties"].items():
        assert key["description"].endswith("."), name
        assert key["default"] == DEFAULTS[ALIASES.get(name, name)]


@pytest.mark.parametrize("key", [*KINDS, *ALIASES])
def test_the_schema_accepts_what_a_run_accepts(key: str) -> None:
    validator = Draft202012Validator(SCHEMA)
    for value in VALUES:
        try:
            normalize({key: value})
            is_right = True
        except ValueError:
            is_right = False
        if isinstance(value, str) and key in TEXTS:
            continue
        if value in (0, 1) and isinstance(DEFAULTS[ALIASES.get(key, key)], bool):
            continue  # a run takes 0 and 1 for False and True as well
        assert validator.is_valid({key: value}) == is_right, (key, value)


def test_unknown_keys_are_no_part_of_the_schema() -> None:
    validator = Draft202012Validator(SCHEMA)
    assert not validator.is_valid({"microbatche": 2}) and validator.is_valid({"_other": 2})


def test_types_are_those_of_the_keys() -> None:
    hints = typing.get_type_hints(ConfigDict)
    assert hints.keys() == KINDS.keys() | ALIASES.keys()
    assert not ConfigDict.__required_keys__
    for name, hint in hints.items():
        kind = KINDS[ALIASES.get(name, name)]
        options = typing.get_args(hint) or (hint,)
        assert (type(None) in options) == kind.optional, name
        if typing.get_origin(hint) is typing.Literal:
            assert options == kind.choices, name
        elif not kind.optional:
            assert type(DEFAULTS[ALIASES.get(name, name)]) in options, name
            literals = (o for o in options if typing.get_origin(o) is typing.Literal)
            assert all(typing.get_args(o) == kind.choices for o in literals), name


# ---- the command


def run(capsys: Any, *words: str) -> tuple[int, str, str]:
    status = main(["config", *words])
    found = capsys.readouterr()
    return status, found.out, found.err


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(LAUNCHER_VARIABLE, raising=False)
    path = tmp_path / "smp.json"
    path.write_text(json.dumps({"pipeline_parallel_degree": 2, "microbatches": 4}))
    return path


def test_a_file_is_checked_like_init_does(capsys: Any, file: Path) -> None:
    status, output, _ = run(capsys, "check", str(file), "--processes", "2")
    assert status == 0 and "2 keys are valid; checked for 2" in output
    status, _, errors = run(capsys, "check", str(file), "--processes", "4")
    assert status == 1 and "ddp=False: 4 processes with pipeline_parallel_degree 2" in errors
    file.write_text(json.dumps({"microbatche": 4}))
    status, _, errors = run(capsys, "check", str(file))
    assert status == 1 and "unknown key; did you mean 'microbatches'?" in errors


def test_values_of_all_keys_are_shown(
    capsys: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCHER_VARIABLE, "microbatches=8")
    status, output, _ = run(capsys, "show", str(file))
    assert status == 0 and "microbatches=8 from the launcher replaces 4" in output
    assert re.search(r"^microbatches +8$", output, re.MULTILINE)
    assert re.search(r"^pipeline +'interleaved'  \(default\)$", output, re.MULTILINE)
    _, output, _ = run(capsys, "show", str(file), "--json")
    shown = json.loads(output)
    assert shown == json.loads(json.dumps(Config.from_dict({**shown}).to_dict()))
    assert shown["microbatches"] == 8


def test_the_command_prints_the_schema(capsys: Any, file: Path) -> None:
    status, output, _ = run(capsys, "schema")
    assert status == 0 and json.loads(output) == json.loads(json.dumps(SCHEMA))


def test_nothing_to_read_is_bad_use(capsys: Any, file: Path) -> None:
    status, _, errors = run(capsys, "show")
    assert status == 2 and "give a JSON or YAML file, or set SM_HP_MP_PARAMETERS" in errors
    status, _, errors = run(capsys, "check", str(file), "--processes", "0")
    assert status == 2 and "expected a number of 1 or more" in errors
