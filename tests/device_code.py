"""Machine code that the CUDA compiler makes of the kernels; no device is needed to read it.

``python -m tests.device_code`` prints the tables of ``docs/design/kernels.md``; ``--write`` writes
them into the page.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from tests.lint.layers import REPO

CUDA = REPO / "csrc/kernels/cuda"
SOURCES = sorted(CUDA.glob("*.cu"))
PAGE = REPO / "docs/design/kernels.md"

_USAGE = re.compile(r"Function (\S+?):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_MEMORY = re.compile(r"\b(LDG|STG|LDL|STL|LD|ST)\b((?:\.\w+)*)")
_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


def _tool(name: str, *folders: Path) -> str | None:
    home = os.environ.get("CUDA_HOME")
    places = [Path(home) / "bin"] if home else []
    places += [*folders, Path("/usr/local/cuda/bin")]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, places)))


def _triton_tools() -> list[Path]:
    spec = importlib.util.find_spec("triton")
    return [Path(spec.origin).parent / "backends/nvidia/bin"] if spec and spec.origin else []


NVCC = _tool("nvcc")
CUOBJDUMP = _tool("cuobjdump", *_triton_tools())
CXXFILT = _tool("c++filt")
MISSING = [
    name
    for name, tool in (("nvcc", NVCC), ("cuobjdump", CUOBJDUMP), ("c++filt", CXXFILT))
    if tool is None
]


def _output(*command: object, given: str | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command], check=True, capture_output=True, text=True, input=given
    )
    return done.stdout


def compiler() -> str:
    """Returns the release of nvcc, such as ``13.0``."""
    found = re.search(r"release ([\d.]+)", _output(NVCC, "--version"))
    assert found is not None
    return found[1]


# ---- Kernels


@dataclass
class Kernel:
    """Machine code of one kernel."""

    registers: int
    stack: int
    shared: int
    local: int
    name: str = ""  # demangled
    accesses: Counter[str] = field(default_factory=Counter)  # "STG.128": how many
    calls: int = 0
    exponentials: int = 0

    def widest(self, access: str) -> int:
        """Returns the bytes of the widest access of a kind, 0 where there is none."""
        kinds = (name.split(".") for name in self.accesses)
        return max((_BYTES[width] for kind, width in kinds if kind == access), default=0)


def _add_line(kernel: Kernel, line: str) -> None:
    if access := _MEMORY.search(line):
        width = re.search(r"\.(U8|S8|U16|S16|64|128)\b", access[2])
        kernel.accesses[f"{access[1]}.{width[1].lstrip('US') if width else '32'}"] += 1
    elif "CALL." in line:
        kernel.calls += 1
    elif "MUFU.EX2" in line:
        kernel.exponentials += 1


def compiled(source: Path, folder: Path) -> dict[str, Kernel]:
    """Returns the kernels of a source, compiled for sm_90, by their mangled names."""
    cubin = folder / f"{source.stem}.cubin"
    flags = ("-std=c++17", "-O3", "-arch=sm_90", "-cubin", f"-I{REPO}")
    _output(NVCC, *flags, "-o", cubin, source)
    usages = _USAGE.findall(_output(CUOBJDUMP, "-res-usage", cubin))
    kernels = {name: Kernel(*map(int, numbers)) for name, *numbers in usages}
    for kernel in kernels.values():
        kernel.shared = max(kernel.shared - _BLOCK_SHARED, 0)
    names = _output(CXXFILT, given="\n".join(kernels)).splitlines()
    for kernel, name in zip(kernels.values(), names, strict=True):
        kernel.name = name
    current = None
    for line in _output(CUOBJDUMP, "-sass", cubin).splitlines():
        if "Function :" in line:
            current = kernels[line.split()[-1]]
        elif current is not None:
            _add_line(current, line)
    return kernels


# ---- Occupancy, by the limits of compute capability 9.0 in NVIDIA's programming guide

_SM_REGISTERS = 65536
_SM_WARPS = 64
_SM_BLOCKS = 32
_SM_SHARED = 228 * 1024
_BLOCK_SHARED = 1024  # of the system, in each block; counted in kernels that have shared memory
_SHARED_UNIT = 128
_WARP_REGISTERS_UNIT = 256
_PARTITIONS = 4  # of an SM; a warp's registers lie in one of them


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def occupancy(threads: int, registers: int, shared: int) -> float:
    """Returns the part of an SM's warps that blocks of this size fill."""
    warps = -(-threads // 32)
    per_warp = _up(registers * 32, _WARP_REGISTERS_UNIT)
    running = _SM_REGISTERS // _PARTITIONS // per_warp * _PARTITIONS
    blocks = min(
        running // warps,
        _SM_WARPS // warps,
        _SM_BLOCKS,
        _SM_SHARED // _up(shared + _BLOCK_SHARED, _SHARED_UNIT),
    )
    return blocks * warps / _SM_WARPS


# ---- Tables

_DTYPES = {"float": "float32", "__nv_bfloat16": "bfloat16"}
_OTHER_DTYPES = {"double", "__half"}
_BODIES = {
    ("GeluBody", "false"): "bias_gelu, forward",
    ("GeluBody", "true"): "bias_gelu, backward",
    ("DropoutBody", ""): "bias_dropout_residual, forward",
    ("DropoutBackwardBody", ""): "bias_dropout_residual, backward",
}


def _constant(source: str, name: str) -> int:
    """Returns a constant of a source, of which each name has a single value."""
    found = re.findall(rf"constexpr \w+ {name} = (\d+)", (CUDA / source).read_text())
    assert len(found) == 1, f"{name} in {source}: {found}"
    return int(found[0])


def _threads(kernel: str, row_threads: int) -> int:
    """Returns the threads of a block, the most where a launch decides."""
    warp = _constant("fused.cuh", "kWarp")
    if row_threads:
        rows = _constant("fused.cuh", "kWarpsPerBlock") if row_threads == warp else 1
        return row_threads * rows
    if kernel in ("columns", "norm_columns"):
        return warp * _constant("fused.cuh", "kColumnRows")
    source, name = {
        "norm_backward_once": ("norm.cu", "kMaxThreads"),
        "rotary": ("elementwise.cu", "kThreads"),
        "combine_slots": ("slots.cuh", "kSlotThreads"),
        "count_steps": ("adam.cu", "kThreads"),
        "running_norms": ("novograd.cu", "kMaxNorms"),
    }.get(kernel, ("chunks.cuh", "kNumThreads"))
    return 1 if kernel == "move_loss_scale" else _constant(source, name)


@dataclass(frozen=True)
class Row:
    """A kernel of the page."""

    label: str
    dtypes: str
    row_threads: int  # 0 where threads do not share rows
    threads: int
    registers: int
    shared: int
    load: int
    store: int

    def cells(self) -> list[str]:
        """Returns the columns behind the label and the dtypes."""
        part = occupancy(self.threads, self.registers, self.shared)
        numbers = (self.threads, self.registers, self.shared)
        return [*map(str, numbers), f"{100 * part:.0f} %", f"{self.load}, {self.store}"]


def _words(template: str) -> list[str]:
    """Returns names, types and numbers of a template's arguments, namespaces left out."""
    return re.findall(r"\w+", re.sub(r"(\w+|\(anonymous namespace\))::", "", template))


_MOMENTS = ("FP32 moments", "BF16 moments", "codes")  # the order of MomentFormat


def _without_format(template: str) -> tuple[str, str]:
    """Takes a value of MomentFormat out of a template's arguments, and returns its name."""
    found = re.search(r", \([\w:]*MomentFormat\)(\d)", template)
    if found is None:
        return template, ""
    return template.replace(found[0], ""), f", {_MOMENTS[int(found[1])]}"


def row_of(kernel: Kernel) -> Row | None:
    """Returns the row of a kernel.

    Kernels for one element at a time have none, nor have those for double, nor for half, which
    differ from those for bfloat16 by the instruction that converts.
    """
    found = re.search(r"(\w+)_kernel(?:<(.*)>)?\(", kernel.name)
    assert found is not None, kernel.name
    template, moments = _without_format(found[2] or "")
    name, words = found[1], _words(template)
    if _OTHER_DTYPES & set(words) or "1" in words:
        return None
    numbers = [int(word) for word in words if word.isdigit()]
    row_threads = numbers[0] if len(numbers) == 2 and name != "columns" else 0
    label, types = name + moments, words
    if name == "columns":
        body = next(i for i, word in enumerate(words) if word.endswith("Body"))
        flag = next((word for word in words if word in ("true", "false")), "")
        label, types = _BODIES[words[body], flag], words[body:]
    elif name == "combine_slots":
        label = f"combine_slots, {words[0]}"
    dtypes = dict.fromkeys(_DTYPES[word] for word in types if word in _DTYPES)
    return Row(
        label,
        " and ".join(dtypes) or "-",
        row_threads,
        _threads(name, row_threads),
        kernel.registers,
        kernel.shared,
        kernel.widest("LDG"),
        kernel.widest("STG"),
    )


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _group(row: Row) -> tuple[str, str]:
    return row.label, row.dtypes


def table(kernels: Iterable[Kernel]) -> str:
    """Returns a table; kernels that differ in the threads of a row are one line."""
    rows = [row for kernel in kernels if (row := row_of(kernel)) is not None]
    head = ["kernel", "dtype", "threads of a block", "registers", "shared bytes", "occupancy"]
    head.append("bytes a thread loads, stores")
    lines = [_line(head), "|" + "---|" * len(head)]
    ordered = sorted(rows, key=lambda row: (_group(row), row.row_threads))
    for group, own in groupby(ordered, _group):
        columns = zip(*(row.cells() for row in own), strict=True)
        merged = (values[:1] if len(set(values)) == 1 else values for values in columns)
        lines.append(_line([*group, *(" / ".join(values) for values in merged)]))
    return "\n".join(lines)


def begin_of(source: str) -> str:
    """Returns the line above the table of a source."""
    return f"### {source}\n\n"


def table_of_page(source: str) -> str:
    """Returns the table of a source as the page has it."""
    text = PAGE.read_text()
    begin = text.index(begin_of(source)) + len(begin_of(source))
    return text[begin:].split("\n\n")[0].rstrip("\n")


def compiler_of_page() -> str:
    """Returns the release of nvcc that compiled the kernels of the page."""
    found = re.search(r"compiled by nvcc ([\d.]+) for sm_90", PAGE.read_text())
    assert found is not None
    return found[1].rstrip(".")


def main() -> None:
    """Prints the tables, or writes them into the page."""
    text = PAGE.read_text()
    text = text.replace(f"by nvcc {compiler_of_page()} for", f"by nvcc {compiler()} for")
    with tempfile.TemporaryDirectory() as folder:
        for source in SOURCES:
            made = table(compiled(source, Path(folder)).values())
            print(f"{begin_of(source.name)}{made}\n", flush=True)
            text = text.replace(
                begin_of(source.name) + table_of_page(source.name),
                begin_of(source.name) + made,
            )
    if "--write" in sys.argv[1:]:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
