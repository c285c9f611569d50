"""The facts that ``setup.cfg`` cannot hold: which releases of torch a wheel asks for.

An extension fits one minor release of torch. ``scripts/wheel.sh`` names all that its wheel has in
``SMP_WHEEL_TORCH``; otherwise it is the installed one alone.
"""

import os
from importlib.metadata import version

from setuptools import setup


def torch_of(releases: list[str]) -> str:
    """Returns the requirement that these releases and others of their minor releases meet."""
    minors = sorted({tuple(map(int, release.split("+")[0].split(".")[:2])) for release in releases})
    (major, first), (last_major, last) = minors[0], minors[-1]
    if major != last_major:
        raise SystemExit(f"a wheel is for one major release of torch, got {' '.join(releases)}")
    missing = [
        f"!={major}.{minor}.*" for minor in range(first, last) if (major, minor) not in minors
    ]
    return "torch" + ",".join([f">={major}.{first}", *missing, f"<{major}.{last + 1}"])


releases = os.environ.get("SMP_WHEEL_TORCH", "").split() or [version("torch")]
setup(install_requires=[torch_of(releases), "numpy", "PyYAML"])
