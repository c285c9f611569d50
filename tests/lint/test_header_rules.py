from __future__ import annotations

from pathlib import Path

import pytest

from tests.lint.header_rules import check_headers
from tests.lint.layers import REPO


def test_includes_are_lean() -> None:
    assert check_headers(REPO) == []


@pytest.mark.parametrize(
    ("place", "include", "complaint"),
    [
        ("csrc/comm/a.cpp", "torch/extension.h", "umbrella"),
        ("csrc/optim/a.cpp", "ATen/ATen.h", "umbrella"),
        ("csrc/pipeline/a.cpp", "pybind11/pybind11.h", "only bindings/"),
        ("csrc/pipeline/a.cpp", "torch/csrc/utils/pybind.h", "only bindings/"),
        ("csrc/partition/a.cpp", "c10/util/Exception.h", "no torch in partition/"),
        ("csrc/kernels/cuda/a.cu", "ATen/core/Tensor.h", "no torch in kernels/"),
        ("csrc/pipeline/a.cpp", "torch/csrc/distributed/c10d/Work.hpp", "comm/*.cpp"),
        ("csrc/comm/a.h", "torch/csrc/distributed/c10d/Work.hpp", "comm/*.cpp"),
        ("csrc/optim/a.cpp", "cuda_runtime.h", "kernels/cuda"),
        ("csrc/pipeline/a.h", "torch/csrc/autograd/function.h", "forward-declare"),
    ],
)
def test_forbidden_include_is_found(
    tmp_path: Path, place: str, include: str, complaint: str
) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True)
    path.write_text(f"#pragma once\n#include <{include}>\n")
    found = check_headers(tmp_path)
    assert len(found) == 1
    assert complaint in found[0]


def test_header_without_guard_and_source_without_own_header_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "csrc/comm"
    folder.mkdir(parents=True)
    (folder / "a.h").write_text("int f();\n")
    (folder / "a.cpp").write_text('#include <vector>\n#include "csrc/comm/a.h"\n')
    complaints = check_headers(tmp_path)
    assert any("no #pragma once" in c for c in complaints)
    assert any("own header comes first" in c for c in complaints)
