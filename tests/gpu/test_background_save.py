"""Copies of a state on a device, made by the thread that saves."""

from __future__ import annotations

import pytest
import torch

from smp.checkpoint.staging import Staging

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_later_copies_follow_what_was_asked_of_the_callers_stream() -> None:
    staging = Staging()
    source = torch.zeros(1 << 22, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        source.add_(1)
        staging.begin()
        (place,) = staging.copy([source], {}, later=True)
        copies = staging.end()
    copies.make()
    copies.wait()
    source.zero_()
    assert place.device.type == "cpu" and bool((place == 1).all())
