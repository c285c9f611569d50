"""What is installed: tools, packages, the build of the extension."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

from smp_cli.doctor.report import Section

_LIMIT_S = 8.0
_TOOLS = {
    "mpirun": "--version",
    "c++": "--version",
    "cmake": "--version",
    "nvcc": "--version",
    "nvidia-smi": "--version",
    "srun": "--version",
}
DISTRIBUTION = "smp-train"
_NAMESAKE = "smp"  # another project on the package index
_PACKAGES = ("numpy", "transformers", "accelerate", "peft", "safetensors", "tokenizers", "PyYAML")


def tools() -> Section:
    """Programs beside the library, none of which it needs to train."""
    section = Section("tools")
    for name, option in _TOOLS.items():
        beside = Path(sys.executable).parent / name
        path = shutil.which(name) or (str(beside) if beside.exists() else None)
        section.values[name] = None if path is None else _first_line(section, path, option)
    return section


def _first_line(section: Section, path: str, option: str) -> str:
    try:
        done = subprocess.run(
            [path, option], capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        section.problems.append(f"{path} {option} does not work: {type(error).__name__}")
        return path
    lines = [line.strip() for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    # nvcc says its release in the middle.
    said = next((line for line in lines if "release" in line), lines[0] if lines else path)
    return said[:120]


def packages() -> Section:
    """Versions of torch and of packages that clients use."""
    section = Section("packages")
    for name in _PACKAGES:
        try:
            section.values[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            section.values[name] = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(_NAMESAKE)
        section.problems.append(
            f"a package {_NAMESAKE} {version} is installed, whose module has the name of this "
            f"library's; this one is {DISTRIBUTION}: pip uninstall {_NAMESAKE}"
        )
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        section.values["torch"] = None
        section.problems.append(f"torch does not load: {error}; install it")
        return section
    nccl = None
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    section.values |= {
        "torch": torch.__version__,
        "torch's CUDA": torch.version.cuda,
        "torch's NCCL": nccl,
        "torch's threads": torch.get_num_threads(),
    }
    if not torch.distributed.is_available():
        section.problems.append("torch was built without torch.distributed, which smp needs")
    return section


def build() -> Section:
    """The extension of smp: whether it loads, and what it was built for."""
    section = Section("build")
    try:
        smp = importlib.import_module("smp")
    except ImportError as error:
        section.problems.append(f"smp does not load: {error}")
        return section
    info = importlib.import_module("smp._build_info")
    has_mpi = smp._C.mpi_available()
    section.values = {
        "smp": smp.__version__,
        "folder": str(Path(str(smp.__file__)).parent),
        "built for torch": info.TORCH_VERSION,
        "CUDA kernels": info.HAS_CUDA,
        "MPI transport": f"{'built' if info.HAS_MPI else 'not built'}, "
        + ("loads" if has_mpi else "does not load"),
    }
    torch = importlib.import_module("torch")
    if torch.cuda.is_available() and not info.HAS_CUDA:
        section.problems.append(
            "this machine has a GPU, but the extension was built without CUDA kernels; rebuild it "
            "where nvcc is installed"
        )
    if info.HAS_MPI and not has_mpi:
        section.problems.append(
            "SMP_TRANSPORT=mpi cannot be used: the MPI libraries that the extension was built for "
            "do not load; install Open MPI, or leave SMP_TRANSPORT alone"
        )
    return section
