"""Machine code that the CUDA compiler makes of the kernels; no device is needed to read it.

A kernel that works on packs of 16 bytes must load and store them whole, and no kernel may keep
variables in memory: both are lost by harmless changes, and nothing else shows it without a device.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import device_code
from tests.device_code import MISSING, SOURCES, Kernel

_MAX_REGISTERS = 64  # with these an SM of sm_90 runs 1024 threads

pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{' and '.join(MISSING)} not found: no machine code to look at"
)


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
    # Parameters in two halves of four; codes of eight elements have 8 bytes.
    ("compact_adam.cu", r"adam_compact_kernelIf", {"LDG.128": 2, "STG.128": 2, "STG.64": 2}),
    ("compact_adam.cu", r"adam_compact_kernelI13", {"LDG.64": 2, "STG.64": 2}),
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


def _check_cross_entropy(kernels: dict[str, Kernel]) -> None:
    """Checks that a pack has an exponential per element, and one for a larger maximum.

    Elements that are loaded one by one have a single one. The sum over a row takes another.
    """
    for name, kernel in _named(kernels, r"cross_entropy_forward_kernelI[^d]").items():
        pack = re.search(r"Li[48]EEEv", name) is not None
        loads = kernel.accesses["LDG.128"] if pack else _single_loads(kernel)
        each = (4 if "kernelIf" in name else 8) + 1 if pack else 1
        assert kernel.exponentials == loads * each + 1, f"{name}: {kernel}"


def _single_loads(kernel: Kernel) -> int:
    """Returns the loads of single elements, but for that of the target and its number."""
    return kernel.accesses["LDG.16"] + kernel.accesses["LDG.32"] - 1


_MORE = {
    "norm.cu": _check_norm,
    "elementwise.cu": _check_rotation,
    "softmax.cu": _check_cross_entropy,
}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_kernels_use_registers_and_whole_packs(source: Path, tmp_path: Path) -> None:
    """Checks a source in a single test: the compiler takes longer than all else."""
    kernels = device_code.compiled(source, tmp_path)
    _check_registers(kernels)
    for name, pattern, least in _WIDE:
        if name == source.name:
            _check_wide(kernels, pattern, least)
    if source.name in _MORE:
        _MORE[source.name](kernels)
    if device_code.compiler() == device_code.compiler_of_page():
        made = device_code.table(kernels.values())
        assert device_code.table_of_page(source.name) == made, "python -m tests.device_code --write"


def test_page_is_compared() -> None:
    """Says where the tables of the page are not compared."""
    releases = device_code.compiler(), device_code.compiler_of_page()
    if releases[0] != releases[1]:
        pytest.skip("nvcc {} is here, nvcc {} compiled the page".format(*releases))
    text = device_code.PAGE.read_text()
    assert [s.name for s in SOURCES if device_code.begin_of(s.name) not in text] == []


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "expected"),
    [
        (1024, 64, 0, 1 / 2),  # 65536 registers
        (1024, 65, 0, 0),
        (256, 32, 0, 1),
        (256, 33, 0, 3 / 4),  # as with 40
        (32, 16, 0, 1 / 2),  # 32 blocks
        (128, 16, 64 * 1024, 3 * 4 / 64),  # 228 KiB
    ],
)
def test_occupancy(threads: int, registers: int, shared: int, expected: float) -> None:
    assert device_code.occupancy(threads, registers, shared) == expected


def test_every_expectation_is_about_a_source_that_exists() -> None:
    assert {name for name, _, _ in _WIDE} | set(_MORE) <= {path.name for path in SOURCES}
