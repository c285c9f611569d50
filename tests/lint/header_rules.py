"""Rules of includes: some headers cost seconds, and few files may include torch."""

from __future__ import annotations

import re
from pathlib import Path

from tests.lint.layers import cpp_files, includes

# Umbrella headers: 5 to 17 seconds each.
_NEVER = {"torch/torch.h", "torch/extension.h", "torch/all.h", "ATen/ATen.h"}
_TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
_PYTHON = re.compile(r"^(Python\.h|pybind11/|torch/csrc/utils/pybind\.h|torch/csrc/.*python_)")
_C10D = "torch/csrc/distributed/c10d/"
_CUDA = re.compile(r"^(cuda|nccl|cublas|ATen/cuda|c10/cuda)")
_WITHOUT_TORCH = {"common", "topology", "partition", "schedule", "health", "kernels"}
# An intrusive pointer to a node cannot do with a declaration.
_NODES = ("csrc/autograd/node.h", "torch/csrc/autograd/function.h")
# Besides these a header of ours forward-declares.
_IN_HEADERS = re.compile(r"^(ATen/core/(Tensor|Generator)\.h|c10/)")
# No kernels, but torch: memory and events of a device that processes share. CMake compiles it where
# the toolkit is.
_CUDA_OUTSIDE_KERNELS = frozenset({"csrc/lanes/cuda_copies.cpp"})
# Bindings of the adapter, which takes a process group from Python, and of hooks of DDP's form.
_C10D_OUTSIDE_COMM = {
    "csrc/bindings/bind_comm_hook.cpp",
    "csrc/bindings/bind_comm.cpp",
}


def check_headers(root: Path) -> list[str]:
    """Complaints about forbidden includes below ``root/csrc``."""
    complaints = []
    for path in cpp_files(root / "csrc"):
        place = path.relative_to(root).as_posix()
        room = path.relative_to(root / "csrc").parts[0]
        is_header = path.suffix == ".h"
        for line, include in includes(path):
            reason = _complaint(place, room, is_header, path.suffix == ".cu", include)
            if reason:
                complaints.append(f"{place}:{line}: {include}: {reason}")
        complaints += _shape(root, path, place)
    return complaints


def _complaint(place: str, room: str, is_header: bool, is_cuda: bool, include: str) -> str | None:
    if include in _NEVER:
        return "umbrella header; include the single one you need"
    if _PYTHON.match(include) and room != "bindings":
        return "only bindings/ knows Python"
    if room in _WITHOUT_TORCH and _TORCH.match(include):
        return f"no torch in {room}/"
    if include.startswith(_C10D):
        if is_header or (room != "comm" and place not in _C10D_OUTSIDE_COMM):
            return "c10d headers belong in comm/*.cpp"
    if _CUDA.match(include) and not (room == "kernels" and is_cuda):
        if place not in _CUDA_OUTSIDE_KERNELS:
            return "CUDA headers belong in kernels/cuda/*.cu"
    if is_header and room != "bindings" and (place, include) != _NODES:
        if _TORCH.match(include) and not _IN_HEADERS.match(include):
            return "headers include ATen/core/Tensor.h at most; forward-declare"
    return None


def _shape(root: Path, path: Path, place: str) -> list[str]:
    """`#pragma once` in headers; the own header first in sources."""
    if path.suffix == ".h":
        if "#pragma once" not in path.read_text():
            return [f"{place}: no #pragma once"]
        return []
    own = path.with_suffix(".h")
    first = next(includes(path), (0, ""))[1]
    if own.is_file() and first != own.relative_to(root).as_posix():
        return [f"{place}: its own header comes first, got '{first}'"]
    return []
