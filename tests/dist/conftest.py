"""Pools of worker processes besides that of the whole test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.older import OLDER, OLDER_FOLDER, open_older_pool
from tests.dist.pool import Pool


@pytest.fixture(scope="session")
def older_pool() -> Iterator[Pool]:
    """A pool with an older transformers; skipped where that is not set up."""
    if not (OLDER_FOLDER / ".smp_ready").is_file():
        pytest.skip(f"no {OLDER_FOLDER.name}; 'scripts/compat.sh transformers {OLDER}' sets it up")
    pool = open_older_pool()
    yield pool
    pool.close()
