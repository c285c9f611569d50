"""Files stay small and speak about the project only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lint.layers import REPO

_SKIPPED = {"__pycache__", "LICENSE", ".git", "_C.pyi"}
_SKIPPED_ON_TOP = {"build", "dist", "third_party"}  # not tests/dist
_CODE = {".py", ".pyi", ".h", ".cpp", ".cu", ".cmake", ".sh", ".in"}
_TEXT = _CODE | {".md", ".txt", ".cfg", ".toml", ".yaml", ".yml", ".supp", ""}
_MAX_LINES = 600

# In pieces, so that this file does not match itself.
_FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w./$}])/" + "(work|home|root|Users)/"),
    "the host of a package registry": re.compile(
        "|".join(("pypi" + r"\.org", "pythonhosted" + r"\.org", "download" + r"\.pytorch\.org"))
    ),
    "a leftover": re.compile(r"\b(TO" + "DO|FIX" + "ME|XX" + r"X)\b"),
}


def files(root: Path, suffixes: set[str]) -> Iterator[Path]:
    for path in sorted(root.iterdir()):
        skipped = _SKIPPED | _SKIPPED_ON_TOP if root == REPO else _SKIPPED
        if path.name in skipped or path.name.endswith((".egg-info", "_cache")):
            continue
        if path.is_symlink():
            continue
        if path.is_dir():
            if path.name.startswith(".") and path.name != ".ci":
                continue
            yield from files(path, suffixes)
        elif path.suffix in suffixes:
            yield path


def find_forbidden(root: Path) -> list[str]:
    found = []
    for path in files(root, _TEXT):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            for what, pattern in _FORBIDDEN.items():
                if pattern.search(line):
                    found.append(f"{path.relative_to(root)}:{number}: {what}: {line.strip()}")
    return found


def test_no_file_is_longer_than_600_lines() -> None:
    lengths = {
        path.relative_to(REPO).as_posix(): len(path.read_text().splitlines())
        for path in files(REPO, _CODE)
    }
    assert {"csrc", "python", "tests/dist"} <= {
        folder.as_posix() for name in lengths for folder in Path(name).parents
    }
    assert {name: n for name, n in lengths.items() if n > _MAX_LINES} == {}


def test_files_name_no_machine_and_no_registry() -> None:
    assert find_forbidden(REPO) == []


@pytest.mark.parametrize(
    "text",
    [
        "see /" + "home/someone/notes",
        "pip install --index-url https://" + "pypi" + ".org/simple",
        "# TO" + "DO later",
    ],
)
def test_forbidden_text_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.py").write_text(f"x = 1\n{text}\n")
    assert len(find_forbidden(tmp_path)) == 1
    assert "a.py:2" in find_forbidden(tmp_path)[0]
