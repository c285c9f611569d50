"""Part `training`: the tests of tests/gpu that train."""

from __future__ import annotations

from benchmarks.gpu import kernels
from benchmarks.gpu.figures import REPO
from benchmarks.gpu.rows import Row
from benchmarks.gpu.tests_of import left_out, row_of

# Files that a first hour needs come first, the longest last; new files are in between.
FIRST = (
    "tests/gpu/test_background_save.py",
    "tests/gpu/test_no_synchronisation.py",
    "tests/gpu/test_offload.py",
    "tests/gpu/test_training.py",
)
LAST = ("tests/gpu/test_split_families.py",)
#: Files of the part `kernels`.
OTHERS = kernels.FILES
#: Arguments of pytest that select the tests of a dry run, by file.
FEW = {"tests/gpu/test_no_synchronisation.py": ["-k", "those_of_the_region"]}


def files() -> list[str]:
    """Paths of all files of the part, in order."""
    found = sorted(str(p.relative_to(REPO)) for p in (REPO / "tests" / "gpu").glob("test_*.py"))
    new = [path for path in found if path not in (*FIRST, *LAST, *OTHERS)]
    return [*FIRST, *new, *LAST]


def rows(part: str, is_dry: bool) -> list[Row]:
    return [
        left_out(path) if is_dry and path not in FEW else row_of(path, FEW.get(path, []))
        for path in files()
    ]
