"""Every check begins with an idle device, no error, no pauses and no counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tests.device as late
from tests.device.checks.held import Held


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
