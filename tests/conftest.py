"""Settings of every Python test: import paths, one thread per process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

# Before torch is imported: several processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Also on a machine with GPUs; tests/gpu asks for them itself.
os.environ.setdefault("SMP_DEVICE", "cpu")

# Of the sample that tests/dist/grid runs; the report of each session names it.
os.environ.setdefault("SMP_GRID_SEED", "1")

for path in (str(REPO / "python"), str(REPO)):
    # `pip install .` may have put another copy in site-packages; the tree under
    # test wins unless SMP_TEST_INSTALLED asks for the installed one.
    if path.endswith("python") and os.environ.get("SMP_TEST_INSTALLED"):
        continue
    if path not in sys.path:
        sys.path.insert(0, path)


from tests.dist.pool import Pool  # noqa: E402


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes, one pool for the whole session."""
    pool = Pool()
    yield pool
    pool.close()


def pytest_report_header() -> str:
    return f"SMP_GRID_SEED={os.environ['SMP_GRID_SEED']}"
