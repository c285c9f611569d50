"""Pools of worker processes besides that of the whole test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.older import open_older_pool, skip_without_older
from tests.dist.pool import Pool


@pytest.fixture(scope="session")
def older_pool() -> Iterator[Pool]:
    """A pool with an older transformers; skipped where that is not set up."""
    skip_without_older()
    pool = open_older_pool()
    yield pool
    pool.close()
