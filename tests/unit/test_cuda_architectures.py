"""GPUs for which a build has machine code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.device_code import CUOBJDUMP, MISSING, NVCC
from tests.lint.layers import REPO
from tests.patience import PATIENCE_S

_SOLD = [80, 86, 89, 90, 100, 120]

_PROJECT = f"""\
cmake_minimum_required(VERSION 3.22)
project(one LANGUAGES CXX)
list(APPEND CMAKE_MODULE_PATH "{REPO}/cmake")
include(smp_cuda)
message("ARCHITECTURES ${{SMP_HAS_CUDA}} ${{CMAKE_CUDA_ARCHITECTURES}}")
if(SMP_HAS_CUDA)
  add_library(one OBJECT "{REPO}/csrc/kernels/cuda/loss_scale.cu")
  target_include_directories(one PRIVATE "{REPO}")
endif()
"""


def _run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} not found: the build's own file cannot be tried")
    env = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=PATIENCE_S)


def _nvcc_of(architectures: list[int], folder: Path) -> Path:
    """Writes a compiler that says what it has."""
    nvcc = folder / "nvcc"
    lines = "".join(f"sm_{one}\\n" for one in architectures)
    nvcc.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    nvcc.chmod(0o755)
    return nvcc


def _sold(architectures: list[int], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the build's choice among the `architectures` that a compiler has."""
    script = folder / "sold.cmake"
    script.write_text(
        f'include("{REPO}/cmake/smp_cuda.cmake")\n'
        f"smp_sold_architectures({_nvcc_of(architectures, folder)} found)\n"
        'message("FOUND ${found}")\n'
    )
    return _run(["cmake", "-DSMP_CUDA=off", "-P", str(script)])


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ([75, *_SOLD, 121], "80-real;86-real;89-real;90-real;100-real;120"),
        ([70, 75, 80, 86, 87, 89, 90], "80-real;86-real;89-real;90"),  # CUDA 12.4
        ([70, 75, 80], "80"),
    ],
)
def test_sold_architectures_are_those_that_the_compiler_has(
    known: list[int], expected: str, tmp_path: Path
) -> None:
    assert f"FOUND {expected}\n" in _sold(known, tmp_path).stderr


def test_compiler_without_a_sold_architecture_is_refused(tmp_path: Path) -> None:
    done = _sold([60, 70], tmp_path)
    assert done.returncode and "set SMP_CUDA_ARCHITECTURES" in " ".join(done.stderr.split())


def test_build_without_a_compiler_has_no_architectures(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(_PROJECT)
    done = _run(["cmake", "-S", str(tmp_path), "-B", str(tmp_path / "b"), "-DSMP_CUDA=off"])
    assert "ARCHITECTURES OFF \n" in done.stderr, done.stderr


@pytest.mark.sample(keep=0)
@pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not found")
@pytest.mark.parametrize(
    ("options", "machine_code", "later"),
    [
        (["-DSKBUILD=2"], _SOLD, [120]),  # a wheel, and `pip install .`
        ([], [90], [80]),  # a checkout
    ],
    ids=["wheel", "checkout"],
)
def test_build_has_code_for_every_gpu_that_is_sold(
    options: list[str], machine_code: list[int], later: list[int], tmp_path: Path
) -> None:
    """Compiles a kernel: machine code, or code that the driver translates."""
    listed = subprocess.run([str(NVCC), "--list-gpu-code"], capture_output=True, text=True)
    known = [int(one) for one in re.findall(r"sm_(\d+)\n", listed.stdout)]
    if 120 not in known:
        pytest.skip(f"this nvcc has {known}")
    (tmp_path / "CMakeLists.txt").write_text(_PROJECT)
    configure = ["cmake", "-S", str(tmp_path), "-B", str(tmp_path / "b"), "-DSMP_CUDA=on"]
    done = _run([*configure, *options], CUDACXX=str(NVCC))
    assert done.returncode == 0, done.stderr
    built = _run(["cmake", "--build", str(tmp_path / "b")])
    assert built.returncode == 0, built.stdout + built.stderr
    (kernel,) = (tmp_path / "b").rglob("loss_scale.cu.o")

    def listing(kind: str) -> list[int]:
        text = _run([str(CUOBJDUMP), f"--list-{kind}", str(kernel)]).stdout
        return sorted(int(one) for one in re.findall(r"\.sm_(\d+)\.", text))

    assert listing("elf") == machine_code and listing("ptx") == later
