"""Runs a script as Python does, with fixed seeds for generators that it does not seed itself.

``python -m smp.observe.verification.seeded SCRIPT ...`` or ``... -m MODULE ...``.
"""

from __future__ import annotations

import importlib.util
import os
import random
import runpy
import sys

import torch

SEED = 20_111


def main(argv: list[str]) -> None:
    """Runs ``argv`` as ``__main__``."""
    random.seed(SEED)
    torch.manual_seed(SEED)
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        numpy.random.seed(SEED)
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
