"""Part `build`: the extension alone, with its CUDA kernels, from what the machine has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

from benchmarks.gpu import processes
from benchmarks.gpu.figures import REPO, Figures, Limit
from benchmarks.gpu.rows import Row

#: The part's own limit ends a build before this one does.
BUILD_S = 600.0
FOLDER = "build/gpu-extension"
#: Imports in a process of its own: this one may have imported what was there before.
PROBE = """
import json, torch, smp
from smp import _C, _build_info
names = {n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names()
         if n.startswith("smp::")}
cuda = [n for n in names if torch._C._dispatch_has_kernel_for_dispatch_key("smp::" + n, "CUDA")]
print(json.dumps([_build_info.HAS_CUDA, _build_info.TORCH_VERSION, len(names), len(cuda)]))
"""


def command(python: str) -> list[str]:
    """Returns the command of a build without C++ tests, in its own folder: CMake keeps options."""
    words = ["scripts/build.sh", FOLDER, python, "--target", "smp_extension"]
    # A machine may have the compiler of an MPI without its library. No part uses MPI.
    return [*words, "-DSMP_TESTS=OFF", "-DSMP_MPI=off", "-DSMP_CUDA_ARCHITECTURES=sold"]


def build(figures: Figures) -> None:
    """Builds the extension; a dry run takes the present extension."""
    name = "seconds of the build"
    if figures.device.is_dry:
        figures.skip(name, "a dry run takes the extension that is there")
        return
    if not os.access(REPO / "python" / "smp", os.W_OK):
        figures.fail(name, f"{REPO} cannot be written: run make gpu in a copy of it")
        return
    begin = time.monotonic()
    env = os.environ | {"SMP_CUDA": "on"}
    try:
        status = processes.run(command(sys.executable), figures.left_s() - 5.0, env, None)
    except processes.TimedOut as error:
        # Without the extension no other part can say anything.
        figures.fail(name, str(error))
        return
    if status != 0:
        figures.fail(name, f"it ended with {processes.words_of(status)}; see the log")
        return
    figures.add(
        name,
        time.monotonic() - begin,
        "s",
        cores=len(os.sched_getaffinity(0)),
        has_ccache=shutil.which("ccache") is not None,
    )


def probe(figures: Figures) -> None:
    """Records the properties of the extension that is imported."""
    env = os.environ | {"PYTHONPATH": str(REPO / "python")}
    done = subprocess.run([sys.executable, "-c", PROBE], env=env, capture_output=True, text=True)
    print(done.stderr)
    if done.returncode != 0:
        figures.fail("import", f"it ended with status {done.returncode}; see the log")
        return
    has_cuda, version, num_operators, num_cuda = json.loads(done.stdout.splitlines()[-1])
    # A build without kernels for a GPU is one for a dry run only.
    least = 0 if figures.device.is_dry else 1
    figures.add("built with CUDA", int(has_cuda), "", bound=Limit(least=least), torch=version)
    figures.add("operators", num_operators, "", bound=Limit(least=10))
    figures.add("operators with a CUDA kernel", num_cuda, "", bound=Limit(least=least))


def rows(part: str, is_dry: bool) -> list[Row]:
    return [Row("seconds of the build", build, 5.0, BUILD_S), Row("import", probe)]
