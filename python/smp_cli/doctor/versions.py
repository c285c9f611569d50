"""Probes installed versions, and whether torch and the extension of smp load."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from pathlib import Path
from types import ModuleType

from smp_cli.doctor.report import Section

DISTRIBUTION = "smp-train"
_NAMESAKE = "smp"  # another project on the package index
_PACKAGES = ("numpy", "transformers", "accelerate", "peft", "safetensors", "tokenizers", "PyYAML")


def packages() -> Section:
    """Lists versions of torch and of packages that clients use."""
    section = Section("packages", {name: _version(name) for name in _PACKAGES})
    if (namesake := _version(_NAMESAKE)) is not None:
        section.problems.append(
            f"a package {_NAMESAKE} {namesake} is installed, whose module has the name of this "
            f"library's; this one is {DISTRIBUTION}: pip uninstall {_NAMESAKE}"
        )
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        section.values["torch"] = None
        section.problems.append(f"torch does not load: {error}; install it")
        return section
    section.values |= {
        "torch": torch.__version__,
        "torch's CUDA": torch.version.cuda,
        "torch's NCCL": _nccl_version(torch),
        "torch's threads": torch.get_num_threads(),
    }
    if not torch.distributed.is_available():
        section.problems.append("torch was built without torch.distributed, which smp needs")
    return section


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl_version(torch: ModuleType) -> str | None:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def build() -> Section:
    """Loads the extension of smp and lists what it was built for."""
    section = Section("build")
    try:
        smp = importlib.import_module("smp")
    except ImportError as error:
        section.problems.append(f"smp does not load: {error}")
        return section
    info = importlib.import_module("smp._build_info")
    loads_mpi = smp._C.mpi_available()
    section.values = {
        "smp": smp.__version__,
        "folder": str(Path(str(smp.__file__)).parent),
        "built for torch": info.TORCH_VERSION,
        "CUDA kernels": info.HAS_CUDA,
        "MPI transport": f"{'built' if info.HAS_MPI else 'not built'}, "
        + ("loads" if loads_mpi else "does not load"),
    }
    torch = importlib.import_module("torch")
    if torch.cuda.is_available() and not info.HAS_CUDA:
        section.problems.append(
            "this machine has a GPU, but the extension was built without CUDA kernels; rebuild it "
            "where nvcc is installed"
        )
    if info.HAS_MPI and not loads_mpi and os.environ.get("SMP_TRANSPORT") == "mpi":
        section.problems.append(
            "SMP_TRANSPORT=mpi cannot be used: the MPI libraries that the extension was built for "
            "do not load; install Open MPI, or leave SMP_TRANSPORT alone"
        )
    return section
