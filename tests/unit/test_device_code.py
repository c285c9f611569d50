"""Machine code that the CUDA compiler makes of the kernels; no device is needed to read it.

A kernel that works on packs of 16 bytes must load and store them whole, and no kernel may keep
variables in memory: both are lost by harmless changes, and nothing else shows it without a device.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.lint.layers import REPO

_SOURCES = sorted((REPO / "csrc/kernels/cuda").glob("*.cu"))
_MAX_REGISTERS = 64  # with these an SM of sm_90 runs 1024 threads

_USAGE = re.compile(r"Function (\S+?):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
_MEMORY = re.compile(r"\b(LDG|STG|LDL|STL|LD|ST)\b((?:\.\w+)*)")


def _tool(name: str, *folders: Path) -> str | None:
    home = os.environ.get("CUDA_HOME")
    places = [Path(home) / "bin"] if home else []
    places += [*folders, Path("/usr/local/cuda/bin")]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, places)))


def _triton_tools() -> list[Path]:
    spec = importlib.util.find_spec("triton")
    return [Path(spec.origin).parent / "backends/nvidia/bin"] if spec and spec.origin else []


_NVCC = _tool("nvcc")
_CUOBJDUMP = _tool("cuobjdump", *_triton_tools())
_MISSING = [name for name, tool in (("nvcc", _NVCC), ("cuobjdump", _CUOBJDUMP)) if tool is None]
pytestmark = pytest.mark.skipif(
    bool(_MISSING), reason=f"{' and '.join(_MISSING)} not found: no machine code to look at"
)


@dataclass
class Kernel:
    """Machine code of one kernel."""

    registers: int
    stack: int
    local: int
    accesses: Counter[str] = field(default_factory=Counter)  # "STG.128": how many
    calls: int = 0


def _kernels(cubin: Path) -> dict[str, Kernel]:
    """Kernels by their mangled names."""

    def dump(what: str) -> str:
        return subprocess.run(
            [str(_CUOBJDUMP), what, str(cubin)], check=True, capture_output=True, text=True
        ).stdout

    kernels = {
        name: Kernel(*map(int, numbers)) for name, *numbers in _USAGE.findall(dump("-res-usage"))
    }
    kernel = None
    for line in dump("-sass").splitlines():
        if "Function :" in line:
            kernel = kernels[line.split()[-1]]
        elif kernel and (access := _MEMORY.search(line)):
            width = re.search(r"\.(U8|S8|U16|S16|64|128)\b", access[2])
            kernel.accesses[f"{access[1]}.{width[1].lstrip('US') if width else '32'}"] += 1
        elif kernel and "CALL." in line:
            kernel.calls += 1
    return kernels


def _compiled(source: Path, folder: Path) -> dict[str, Kernel]:
    """Kernels of a source, compiled for sm_90."""
    cubin = folder / "kernels.cubin"
    subprocess.run(
        [str(_NVCC), "-std=c++17", "-O3", "-arch=sm_90", "-cubin", f"-I{REPO}"]
        + ["-o", str(cubin), str(source)],
        check=True,
    )
    return _kernels(cubin)


def _named(kernels: dict[str, Kernel], pattern: str) -> dict[str, Kernel]:
    found = {name: k for name, k in kernels.items() if re.search(pattern, name)}
    assert found, f"no kernel matches {pattern} among {sorted(kernels)}"
    return found


_HALF = r"(6__half|13__nv_bfloat16)"

# Source, kernels, and the least number of accesses of each kind in each of them.
_WIDE = [
    # A result; sums of eight columns, two packs; the bias, two packs.
    ("elementwise.cu", rf"columns_kernelIfLi8E.*GeluBodyI{_HALF}", {"STG.128": 3, "LDG.128": 3}),
    ("elementwise.cu", rf"columns_kernelIfLi8E.*DropoutBodyI{_HALF}", {"STG.128": 3, "LDG.128": 4}),
    ("elementwise.cu", r"columns_kernelIfLi8E.*DropoutBackwardBody", {"STG.128": 3, "LDG.128": 1}),
    ("elementwise.cu", r"columns_kernelIfLi4E", {"STG.128": 2, "LDG.128": 1}),
    ("elementwise.cu", r"columns_kernelIdLi2E", {"STG.128": 2, "LDG.128": 1}),
    # Halves, neighbours and what is copied; tables.
    ("elementwise.cu", rf"rotary_kernelI{_HALF}Li8E", {"STG.128": 4, "LDG.128": 4 + 6}),
    ("elementwise.cu", r"rotary_kernelI(fLi4|dLi2)E", {"STG.128": 4, "LDG.128": 4 + 2}),
    # x three times; weight and bias.
    ("norm.cu", rf"norm_forward_kernelI{_HALF}Li\d+ELi8E", {"STG.128": 1, "LDG.128": 3 + 4}),
    ("norm.cu", r"norm_forward_kernelI(fLi\d+ELi4|dLi\d+ELi2)E", {"STG.128": 1, "LDG.128": 3 + 2}),
    ("norm.cu", rf"norm_backward_kernelI{_HALF}Li\d+ELi8E", {"STG.128": 1, "LDG.128": 4 + 4}),
    ("norm.cu", rf"norm_columns_kernelI{_HALF}Li8E", {"STG.128": 4, "LDG.128": 2}),
    ("softmax.cu", rf"softmax_(for|back)ward_kernelI{_HALF}Li\d+ELi8E", {"STG.128": 1}),
    ("softmax.cu", rf"cross_entropy_backward_kernelI{_HALF}Li\d+ELi8E", {"STG.128": 1}),
    ("softmax.cu", rf"cross_entropy_forward_kernelI{_HALF}Li\d+ELi8E", {"LDG.128": 1}),
    ("multi_array.cu", r"(sum_of_squares|max_abs)_kernel", {"LDG.128": 1}),
    ("multi_array.cu", r"scale_kernel", {"LDG.128": 1, "STG.128": 1}),
    # Parameter and two moments; copies of four elements have 8 bytes.
    ("adam.cu", r"adam_kernelIf", {"LDG.128": 3, "STG.128": 3, "STG.64": 2}),
    ("lamb.cu", r"lamb_moments_kernelIf", {"LDG.128": 3, "STG.128": 2}),
    ("lamb.cu", r"lamb_apply_kernelIf", {"LDG.128": 3, "STG.128": 1, "STG.64": 2}),
    ("novograd.cu", r"momentum_kernelIf", {"LDG.128": 2, "STG.128": 2, "STG.64": 2}),
]


def _check_registers(kernels: dict[str, Kernel]) -> None:
    """Variables are in registers, and an SM has room for 1024 threads."""
    assert kernels
    for name, kernel in kernels.items():
        assert (kernel.stack, kernel.local) == (0, 0), name
        assert not {a for a in kernel.accesses if a.startswith(("LDL", "STL"))}, name
        assert 0 < kernel.registers <= _MAX_REGISTERS, name


def _check_wide(kernels: dict[str, Kernel], pattern: str, least: dict[str, int]) -> None:
    """Packs are loaded and stored whole."""
    for name, kernel in _named(kernels, pattern).items():
        for access, count in least.items():
            assert kernel.accesses[access] >= count, f"{name}: {access} in {kernel.accesses}"


def _check_norm(kernels: dict[str, Kernel]) -> None:
    """The backward reads x and dy once."""
    for name, kernel in _named(kernels, rf"norm_backward_once_kernelI{_HALF}Li8E").items():
        # The others are the weight.
        assert kernel.accesses["LDG.128"] == 2 + 2, f"{name}: {kernel.accesses}"
        assert kernel.accesses["STG.128"] == 1 + 4, f"{name}: {kernel.accesses}"


def _check_rotation(kernels: dict[str, Kernel]) -> None:
    """Checks that no 64-bit number is divided by another one: that would be a subroutine."""
    for name, kernel in _named(kernels, r"rotary_kernel").items():
        assert kernel.calls == 0, name


_MORE = {"norm.cu": _check_norm, "elementwise.cu": _check_rotation}


@pytest.mark.parametrize("source", _SOURCES, ids=lambda path: path.name)
def test_kernels_use_registers_and_whole_packs(source: Path, tmp_path: Path) -> None:
    """Checks a source in a single test: the compiler takes longer than all else."""
    kernels = _compiled(source, tmp_path)
    _check_registers(kernels)
    for name, pattern, least in _WIDE:
        if name == source.name:
            _check_wide(kernels, pattern, least)
    if source.name in _MORE:
        _MORE[source.name](kernels)


def test_every_expectation_is_about_a_source_that_exists() -> None:
    assert {name for name, _, _ in _WIDE} | set(_MORE) <= {path.name for path in _SOURCES}
