"""Another release of transformers, in a folder of its own beside the one of the tests."""

from __future__ import annotations

import os

import pytest

from tests.dist.pool import Pool
from tests.dist.processes import REPO

OLDER = "4.30.2"
OLDER_FOLDER = REPO / f".venv-transformers-{OLDER}"


def open_older_pool(preload: str = "", **env: str) -> Pool:
    """Processes that find the older transformers first; torch and the rest are shared.

    Args:
        preload: further modules, with commas between them, that are imported before the first fork.
        env: further environment variables of the processes.
    """
    pool = Pool()
    before = os.environ.get("PYTHONPATH")
    paths = [str(OLDER_FOLDER), *([before] if before else [])]
    modules = ",".join(filter(None, ("tests.dist.without_datasets", preload)))
    settings = {"PYTHONPATH": os.pathsep.join(paths), "SMP_TEST_PRELOAD": modules, **env}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        pool.zygote()  # takes the environment of this moment
    return pool


def skip_without_older() -> None:
    """Skips a test where the older transformers is not set up."""
    if not (OLDER_FOLDER / ".smp_ready").is_file():
        pytest.skip(f"no {OLDER_FOLDER.name}; 'scripts/compat.sh transformers {OLDER}' sets it up")
