"""Part `sanitizer`: operators and optimizers under compute-sanitizer, where there is one."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile

from benchmarks.gpu import processes, sanitized
from benchmarks.gpu.figures import Figures, Limit
from benchmarks.gpu.rows import Row
from benchmarks.gpu.tests_of import environment

TOOLS = ("memcheck", "racecheck")
TOOL_S = 150.0
#: Status of compute-sanitizer after errors.
FOUND = 9


def program() -> str | None:
    """compute-sanitizer, if there is one."""
    name = "compute-sanitizer"
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")


def run_sanitized(figures: Figures, tool: str) -> None:
    """Runs each operator and optimizer once, at odd sizes, under one tool."""
    name = f"{tool} of operators and optimizers: errors"
    found = program()
    if found is None:
        figures.skip(name, "there is no compute-sanitizer")
        return
    command = [found, f"--tool={tool}", f"--error-exitcode={FOUND}", sys.executable]
    command += ["-m", "benchmarks.gpu.sanitized", "--device=cuda"]
    # Without PyTorch's cache each tensor is an allocation, whose ends are known.
    env = environment(os.environ) | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with figures.measuring(name), tempfile.TemporaryFile() as output:
        try:
            limit_s = min(TOOL_S, figures.left_s() - 5.0)
            status = processes.run(command, limit_s, env, output.fileno())
        finally:
            output.seek(0)
            text = output.read().decode(errors="replace")
            print(text)
        if status in (0, FOUND):
            figures.add(name, int(status == FOUND), "runs with errors", bound=Limit(most=0))
        elif "Device not supported" in text:
            figures.skip(name, "compute-sanitizer does not support this device")
        else:
            figures.fail(name, f"it ended with {processes.words_of(status)}; see the log")


def run_plain(figures: Figures) -> None:
    """Runs the same without a tool."""
    num_runs = sanitized.run_all(figures.device.kind)
    figures.add("what the sanitizer runs", num_runs, "runs", bound=Limit(least=20))


def rows(part: str, is_dry: bool) -> list[Row]:
    tools = [
        Row(tool, lambda figures, tool=tool: run_sanitized(figures, tool), 30.0, TOOL_S + 30.0)
        for tool in TOOLS
    ]
    return [Row("what the sanitizer runs", run_plain), *([] if is_dry else tools)]
