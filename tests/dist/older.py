"""Another release of transformers, in a folder of its own beside the one of the tests."""

from __future__ import annotations

import os

from tests.dist.pool import Pool
from tests.dist.processes import REPO

OLDER = "4.30.2"
OLDER_FOLDER = REPO / f".venv-transformers-{OLDER}"


def open_older_pool() -> Pool:
    """Processes that find the older transformers first; torch and the rest are shared."""
    pool = Pool()
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(OLDER_FOLDER), *([before] if before else [])])
    try:
        pool.zygote()  # takes the environment of this moment
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return pool
