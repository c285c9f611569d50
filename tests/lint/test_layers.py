"""The folder tree is the architecture: includes and imports go downwards only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lint import layers


def _write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cpp_includes_go_down_only() -> None:
    assert layers.cpp_files(layers.REPO / "csrc"), "no sources found: the check would be empty"
    assert layers.check_cpp(layers.REPO) == []


def test_python_imports_go_down_only() -> None:
    assert (layers.REPO / "python/smp/__init__.py").is_file()
    assert layers.check_python(layers.REPO) == []


def test_the_core_imports_no_tools() -> None:
    found = layers.used_tools(layers.REPO)
    assert found == {}, "tools observe the core, which does not import them"


@pytest.mark.parametrize(
    ("line", "tool"),
    [
        ("from smp.observe.metrics import x", "observe"),
        ("from smp import planning", "planning"),
        ("import smp.commands.plan", "commands"),
        ("def f():\n    from smp_cli.main import main", "smp_cli"),
    ],
)
def test_an_import_of_a_tool_is_found(tmp_path: Path, line: str, tool: str) -> None:
    _write(tmp_path, "python/smp/model/a.py", line + "\n")
    _write(tmp_path, "python/smp/observe/a.py", line + "\n")
    _write(tmp_path, "python/smp/step/a.py", "from smp.model import x\n")
    assert layers.used_tools(tmp_path) == {"model/a.py": frozenset({tool})}


def test_the_picture_of_the_rooms_is_the_tree() -> None:
    package = layers.REPO / "python" / "smp"
    folders = {path.name for path in package.iterdir() if any(path.glob("*.py"))}
    assert folders - layers.PUBLIC_PATHS == frozenset().union(*layers.PYTHON_LAYERS)
    assert len(layers.PYTHON_LAYERS) <= 12
    text = (layers.REPO / "ARCHITECTURE.md").read_text()
    table = text.split("## Rooms of `python/smp`")[1].split("\n## ")[0]
    drawn: dict[str, int] = {}
    for row in re.findall(r"^\| (\d+) \| `(\w+)/` \|", table, re.MULTILINE):
        drawn[row[1]] = int(row[0])
    assert drawn == {room: layers.python_layer(room) + 1 for room in folders & drawn.keys()}
    assert drawn.keys() == folders - layers.PUBLIC_PATHS


def test_cmake_links_each_room_with_the_rooms_below_it_only() -> None:
    declared = layers.cmake_dependencies(layers.REPO)
    known = frozenset().union(*layers.CPP_LAYERS) - {"bindings"}
    assert set(declared) == known
    for room, below in declared.items():
        assert below <= layers.allowed_rooms(room), room


@pytest.mark.parametrize(
    ("place", "include", "complaint"),
    [
        ("csrc/topology/a.h", "csrc/comm/b.h", "'topology' may not include 'comm'"),  # up
        ("csrc/pipeline/a.cpp", "csrc/optim/b.h", "'pipeline' may not include 'optim'"),  # sideways
        ("csrc/comm/a.cpp", "csrc/memory/b.h", "'comm' may not include 'memory'"),  # sideways
        ("csrc/comm/a.cpp", "csrc/partition/b.h", "'comm' may not include"),  # narrowed
        ("csrc/health/a.cpp", "csrc/comm/b.h", "'health' may not include 'comm'"),  # up
        ("csrc/gradients/a.cpp", "csrc/parameters/b.h", "may not include 'parameters'"),  # sideways
        ("csrc/kernels/cpu/a.cpp", "csrc/common/b.h", "only itself"),
        ("tests/cpp/comm/a.cpp", "csrc/pipeline/b.h", "'comm' may not include 'pipeline'"),
        ("tests/cpp/cuda_runtime/a.cpp", "csrc/memory/b.h", "only itself"),
        ("csrc/comm/a.cpp", "../common/b.h", "from the repository root"),
        ("csrc/attic/a.cpp", "vector", "'attic' is in no layer"),
    ],
)
def test_wrong_include_is_found(tmp_path: Path, place: str, include: str, complaint: str) -> None:
    _write(tmp_path, place, f'#pragma once\n#include "{include}"\n')
    found = layers.check_cpp(tmp_path)
    assert len(found) == 1
    assert complaint in found[0]
    assert place in found[0]


def test_right_includes_pass(tmp_path: Path) -> None:
    _write(tmp_path, "csrc/pipeline/a.cpp", '#include "csrc/comm/b.h"\n#include <vector>\n')
    _write(tmp_path, "csrc/bindings/a.cpp", '#include "csrc/pipeline/b.h"\n')
    assert layers.check_cpp(tmp_path) == []


@pytest.mark.parametrize(
    ("place", "line", "complaint"),
    [
        ("config/keys.py", "from smp.world import runtime", "'config' may not import 'world'"),
        ("world/groups.py", "from smp.step import step", "'world' may not import 'step'"),
        ("world/groups.py", "from ..model import Model", "'world' may not import 'model'"),
        ("nn/linear.py", "import smp.pipeline.hub", "'nn' may not import 'pipeline'"),  # sideways
        ("model/a.py", "import smp", "import the room that has it"),
        ("model/a.py", "from smp.metrics import difference", "import the room that has it"),
        ("model/a.py", "def f():\n    from smp.config import Config", "top of the file"),
        ("attic/a.py", "import os", "'attic' is in no layer"),
        ("model/a.py", "from smp.attic import x", "'attic' is in no layer"),
        ("attic.py", "import os", "a module beside the rooms"),
        ("metrics.py", "def f():\n    pass", "gives out names only"),
    ],
)
def test_wrong_import_is_found(tmp_path: Path, place: str, line: str, complaint: str) -> None:
    _write(tmp_path, f"python/smp/{place}", line + "\n")
    found = layers.check_python(tmp_path)
    assert len(found) == 1
    assert complaint in found[0]


def test_right_imports_pass(tmp_path: Path) -> None:
    _write(tmp_path, "python/smp/pipeline/calls.py", "from .wire import pack\nimport torch\n")
    _write(
        tmp_path, "python/smp/step/a.py", "from smp import _C, world\nimport smp.pipeline.calls\n"
    )
    _write(tmp_path, "python/smp/utils.py", "from smp.v1.utils import a\n\n__all__ = ['a']\n")
    _write(tmp_path, "python/smp/__init__.py", "from smp.step import step\n")
    assert layers.check_python(tmp_path) == []
