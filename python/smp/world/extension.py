"""Loads the C++ core that was built for the installed torch."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from smp._torch_releases import minor

_PACKAGE = Path(__file__).resolve().parents[1]


def load() -> None:
    """Imports ``smp._C``; afterwards ``from smp import _C`` works.

    Raises:
        ImportError: if no extension has been built, or none for this minor release of torch,
            whose binary interface differs from others. The text says how to build it.
    """
    folder = folder_for(torch.__version__, extensions(_PACKAGE))
    path = sys.modules["smp"].__path__
    if str(folder) not in path:
        path.insert(0, str(folder))
    importlib.import_module("smp._C")


def extensions(package: Path) -> dict[str, Path]:
    """Returns the folders with an extension, by the minor release of torch that it was built for.

    A build of one release is in the package itself, a wheel has a folder for each release.
    """
    infos = (package / "_build_info.py", *package.glob("torch*/_build_info.py"))
    return {
        minor(runpy.run_path(str(info))["TORCH_VERSION"]): info.parent
        for info in infos
        if info.is_file()
    }


def folder_for(installed: str, folders: Mapping[str, Path]) -> Path:
    """Returns the folder of the extension for an installed release of torch.

    Raises:
        ImportError: if there is none; the text names the releases that there are.
    """
    if not folders:
        raise ImportError(f"the C++ extension of smp is missing in {_PACKAGE}; {_rebuild_hint()}")
    if minor(installed) not in folders:
        built = sorted(folders, key=lambda release: [int(number) for number in release.split(".")])
        raise ImportError(
            f"smp was built for torch {' and '.join(built)}, but torch {installed} is installed; "
            f"install torch {' or '.join(built)}, or {_rebuild_hint()}"
        )
    return folders[minor(installed)]


def _rebuild_hint() -> str:
    root = _PACKAGE.parents[1]
    if (root / "CMakeLists.txt").is_file():
        return f"build it with `make build` in {root}"
    options = "--no-build-isolation --no-deps --force-reinstall"
    return f"rebuild it with `pip install {options} <folder of smp's sources>`"
