"""Part `kernels`: operators and optimizers against references; a few under compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from benchmarks.gpu import sanitized
from benchmarks.gpu.figures import REPO, Figures, Limit
from benchmarks.gpu.tests_of import environment, run_tests

FILES = (
    "tests/gpu/test_fused_ops.py",
    "tests/gpu/test_fused_optimizers.py",
    "tests/unit/test_optim_ops.py",
)
#: Arguments of pytest in a dry run: few tests of these files.
DRY = ("tests/unit/test_optim_ops.py", "-k", "clip_divisor_is_that")
TOOLS = ("memcheck", "racecheck")
TOOL_S = 120.0


def sanitizer() -> str | None:
    """compute-sanitizer, if there is one."""
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )


def run_sanitized(figures: Figures, tool: str) -> None:
    """Runs each operator and optimizer once, at odd sizes, under one tool."""
    name = f"{tool} of operators and optimizers: errors"
    program = sanitizer()
    if program is None:
        figures.skip(name, "there is no compute-sanitizer")
        return
    if not figures.has_time(name, TOOL_S / 2):
        return
    command = [program, f"--tool={tool}", "--error-exitcode=9", sys.executable]
    command += ["-m", "benchmarks.gpu.sanitized", "--device=cuda"]
    # Without PyTorch's cache each tensor is an allocation, whose ends are known.
    env = environment(os.environ) | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    limit_s = min(TOOL_S, figures.left_s() - 5.0)
    try:
        done = subprocess.run(
            command,
            cwd=REPO,
            env=env,
            timeout=limit_s,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except subprocess.TimeoutExpired as error:
        print(error.output)
        # Slow is no error of ours; what it had found by then is in the log.
        figures.skip(name, f"it did not end within {limit_s:.0f} s")
        return
    print(done.stdout)
    if done.returncode in (0, 9):
        figures.add(name, int(done.returncode == 9), "runs with errors", bound=Limit(most=0))
    elif "Device not supported" in done.stdout:
        figures.skip(name, "compute-sanitizer does not support this device")
    else:
        figures.fail(name, f"it ended with status {done.returncode}; see the log")


def body(figures: Figures) -> None:
    for path in FILES:
        if figures.device.is_dry and path != DRY[0]:
            figures.skip(path, "a dry run takes one file; `make test` runs all of them on the CPU")
        else:
            run_tests(figures, path, DRY[1:])
    if figures.device.is_dry:
        with figures.measuring("what the sanitizer runs"):
            num_runs = sanitized.run_all(figures.device.kind)
            figures.add("what the sanitizer runs", num_runs, "runs", bound=Limit(least=20))
    for tool in TOOLS:
        run_sanitized(figures, tool)
