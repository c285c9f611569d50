"""Fixtures of tests without a process group: the start and the end of smp, and a local store."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.unit import s3_server


@pytest.fixture
def running() -> Iterator[None]:
    """Starts smp with all defaults, and ends it after the test."""
    import smp

    smp.init({})
    yield
    smp.shutdown()


@pytest.fixture
def ends() -> Iterator[None]:
    """Ends smp after a test that starts it."""
    import smp

    yield
    smp.shutdown()


@pytest.fixture
def start() -> Iterator[Callable[..., None]]:
    """Returns a function that starts smp with the given keys; smp ends after the test."""
    import smp

    yield lambda **config: smp.init(config)
    smp.shutdown()


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, str]]:
    """Runs a local S3 server; returns the variables of its clients."""
    with s3_server.running() as env:
        yield env
