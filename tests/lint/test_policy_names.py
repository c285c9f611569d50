"""A pipeline policy says itself what depends on it: nothing else knows policies by name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.lint.layers import REPO, cpp_files

_NAME = re.compile(r'static const std::string text = "(\w+)";')
_LITERAL = re.compile(r'"(\w+)"')
_DEFAULT = "constexpr const char* kDefaultPolicy"


def policy_names(root: Path) -> set[str]:
    sources = (root / "csrc/schedule").glob("policy_*.cpp")
    return {name for path in sources for name in _NAME.findall(path.read_text())}


def find_names(root: Path) -> list[str]:
    """Literals that name a policy, outside of the policies and of the constant of the default."""
    names = policy_names(root)
    found = []
    for path in cpp_files(root / "csrc"):
        place = path.relative_to(root).as_posix()
        if re.fullmatch(r"csrc/schedule/policy_\w+\.cpp", place):
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            code = line.split("//")[0]
            if _DEFAULT not in code and names.intersection(_LITERAL.findall(code)):
                found.append(f"{place}:{number}")
    for path in sorted((root / "python").rglob("*.py")):
        place = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in names:
                found.append(f"{place}:{node.lineno}")
    return found


def test_only_policies_know_their_names() -> None:
    assert len(policy_names(REPO)) >= 4
    assert find_names(REPO) == []


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("csrc/pipeline/a.cpp", 'if (policy->name() == "plain") return;'),
        ("csrc/schedule/policy.cpp", 'return make("plain");'),
        ("python/smp/model/a.py", 'ahead = pipeline != "plain"'),
    ],
)
def test_a_name_elsewhere_is_found(tmp_path: Path, place: str, text: str) -> None:
    policy = tmp_path / "csrc/schedule/policy_plain.cpp"
    policy.parent.mkdir(parents=True)
    policy.write_text('    static const std::string text = "plain";\n')
    assert find_names(tmp_path) == []
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    assert find_names(tmp_path) == [f"{place}:1"]
