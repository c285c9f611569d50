"""What the CUDA compiler makes of the kernels, read from their machine code; no device is needed.

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


_COMPILED: dict[str, dict[str, Kernel]] = {}


@pytest.fixture
def compiled(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Kernel]:
    """Kernels of the source that the test names, compiled for sm_90."""
    name = request.param
    if name not in _COMPILED:
        cubin = tmp_path / "kernels.cubin"
        source = REPO / f"csrc/kernels/cuda/{name}"
        subprocess.run(
            [str(_NVCC), "-std=c++17", "-O3", "-arch=sm_90", "-cubin", f"-I{REPO}"]
            + ["-o", str(cubin), str(source)],
            check=True,
        )
        _COMPILED[name] = _kernels(cubin)
    return _COMPILED[name]


def _named(kernels: dict[str, Kernel], pattern: str) -> dict[str, Kernel]:
    found = {name: k for name, k in kernels.items() if re.search(pattern, name)}
    assert found, f"no kernel matches {pattern} among {sorted(kernels)}"
    return found


@pytest.mark.parametrize("compiled", [path.name for path in _SOURCES], indirect=True)
def test_kernels_keep_their_variables_in_registers(compiled: dict[str, Kernel]) -> None:
    assert compiled
    for name, kernel in compiled.items():
        assert (kernel.stack, kernel.local) == (0, 0), name
        assert not {a for a in kernel.accesses if a.startswith(("LDL", "STL"))}, name
        assert 0 < kernel.registers <= _MAX_REGISTERS, name


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
    ("multi_array.cu", r"add_scaled_kernel", {"LDG.128": 2, "STG.128": 1}),
    # Parameter and two moments; copies of four elements have 8 bytes.
    ("adam.cu", r"adam_kernelIf", {"LDG.128": 3, "STG.128": 3, "STG.64": 2}),
    ("lamb.cu", r"lamb_moments_kernelIf", {"LDG.128": 3, "STG.128": 2}),
    ("lamb.cu", r"lamb_apply_kernelIf", {"LDG.128": 3, "STG.128": 1, "STG.64": 2}),
    ("novograd.cu", r"momentum_kernelIf", {"LDG.128": 2, "STG.128": 2, "STG.64": 2}),
]


@pytest.mark.parametrize(
    ("compiled", "pattern", "least"),
    _WIDE,
    indirect=["compiled"],
    ids=lambda value: str(value)[:40],
)
def test_packs_are_loaded_and_stored_whole(
    compiled: dict[str, Kernel], pattern: str, least: dict[str, int]
) -> None:
    for name, kernel in _named(compiled, pattern).items():
        for access, count in least.items():
            assert kernel.accesses[access] >= count, f"{name}: {access} in {kernel.accesses}"


@pytest.mark.parametrize("compiled", ["norm.cu"], indirect=True)
def test_backward_of_a_norm_reads_x_and_dy_once(compiled: dict[str, Kernel]) -> None:
    for name, kernel in _named(compiled, rf"norm_backward_once_kernelI{_HALF}Li8E").items():
        # The others are the weight.
        assert kernel.accesses["LDG.128"] == 2 + 2, f"{name}: {kernel.accesses}"
        assert kernel.accesses["STG.128"] == 1 + 4, f"{name}: {kernel.accesses}"


@pytest.mark.parametrize("compiled", ["elementwise.cu"], indirect=True)
def test_rotation_divides_by_no_64_bit_number(compiled: dict[str, Kernel]) -> None:
    for name, kernel in _named(compiled, r"rotary_kernel").items():
        # Such a division is a subroutine.
        assert kernel.calls == 0, name
