"""Loads the C++ core, after making sure that it fits the installed torch."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

from smp._torch_releases import minor

_PACKAGE = Path(__file__).resolve().parents[1]


def load() -> None:
    """Imports ``smp._C``; afterwards ``from smp import _C`` works.

    Raises:
        ImportError: if the extension has not been built, or was built for another minor
            release of torch, whose binary interface differs. The text says how to build it.
    """
    try:
        built_for = importlib.import_module("smp._build_info").TORCH_VERSION
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the C++ extension of smp is missing in {_PACKAGE}; {_rebuild_hint()}"
        ) from error
    if minor(built_for) != minor():
        raise ImportError(
            f"smp was built for torch {built_for}, but torch {torch.__version__} is installed; "
            f"install torch {minor(built_for)} or {_rebuild_hint()}"
        )
    importlib.import_module("smp._C")


def _rebuild_hint() -> str:
    root = _PACKAGE.parents[1]
    if (root / "CMakeLists.txt").is_file():
        return f"build it with `make build` in {root}"
    options = "--no-build-isolation --no-deps --force-reinstall"
    return f"rebuild it with `pip install {options} <folder of smp's sources>`"
