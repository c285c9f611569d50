"""`make gpu` imports no package that a machine for GPUs does not have.

tests/unit/test_gpu_parts.py hides such packages, and programs, and runs it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.lint.layers import REPO

ALLOWED = {"torch", "transformers", "pytest", "hypothesis"}
OWN = ("benchmarks", "tests", "smp", "smp_testing")
#: Scripts and tests that run there, with all that these import.
ROOTS = ("benchmarks/gpu", "tests/gpu", "tests/unit/test_optim_ops.py", "tests/conftest.py")


def imports_of(path: Path, everywhere: bool) -> Iterator[str]:
    """Dotted names that a file imports when it is imported; those of functions if asked."""

    def visit(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0 and child.module is not None, path
                yield child.module
                yield from (f"{child.module}.{alias.name}" for alias in child.names)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            elif everywhere or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from visit(child)

    yield from visit(ast.parse(path.read_text()))


def files_of(name: str) -> Iterator[Path]:
    """Files of this repository that are run to import a dotted name."""
    folder = REPO / "python" if name.partition(".")[0] == "smp" else REPO
    for part in name.split("."):
        folder = folder / part
        for path in (folder / "__init__.py", folder.with_suffix(".py")):
            if path.exists():
                yield path


def foreign_imports(roots: Iterator[Path]) -> dict[str, set[str]]:
    """Packages from elsewhere that files import, and files that these import; with the files."""
    found: dict[str, set[str]] = {}
    waiting, seen = list(roots), set[Path]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        shown = str(path.relative_to(REPO)) if path.is_relative_to(REPO) else str(path)
        # The library's imports within functions are for features that are unused here.
        for name in imports_of(path, everywhere=not shown.startswith("python/")):
            package = name.partition(".")[0]
            if package in OWN:
                waiting += files_of(name)
            elif package not in sys.stdlib_module_names:
                found.setdefault(package, set()).add(shown)
    assert len(seen) > 1
    return found


def roots() -> Iterator[Path]:
    for name in ROOTS:
        path = REPO / name
        yield from path.rglob("*.py") if path.is_dir() else [path]


def test_scripts_and_tests_for_gpus_import_what_is_there() -> None:
    found = foreign_imports(roots())
    assert {"torch", "transformers", "pytest"} <= set(found)
    assert {package: files for package, files in found.items() if package not in ALLOWED} == {}


def test_a_package_that_is_not_there_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import benchmarks.gpu.page\ndef f():\n    from rich.text import Text\n"
    )
    assert foreign_imports(iter([tmp_path / "a.py"]))["rich"] == {str(tmp_path / "a.py")}
