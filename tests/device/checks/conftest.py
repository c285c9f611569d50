"""Every check begins with an idle device, no error, no pauses and no counts."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["SMP_LATE_MEMORY_MB"] = "64"  # a check fills it

import pytest  # noqa: E402
import torch  # noqa: E402

import tests.device as late  # noqa: E402 - reads the variable
from tests.device.checks.held import Held  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_device() -> Iterator[None]:
    late.set_delays(1, 0)
    late.reset_counts()
    yield
    late.take_error()
    for index in range(torch.late.device_count()):
        torch.late.synchronize(index)
    torch.late.set_device(0)


@pytest.fixture
def held() -> Iterator[Held]:
    """A stream that does nothing before it is released."""
    held = Held(torch.late.Stream())
    yield held
    held.release()
