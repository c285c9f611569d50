"""Copies of a state on a device, made by the thread that saves."""

from __future__ import annotations

import contextlib

import torch

from smp.checkpoint.staging import Staging
from tests.gpu.device import DEVICE, synchronize


def test_later_copies_follow_what_was_asked_of_the_callers_stream() -> None:
    staging = Staging()
    source = torch.zeros(1 << 22, device=DEVICE)
    synchronize()
    cuda = DEVICE == "cuda"
    with torch.cuda.stream(torch.cuda.Stream()) if cuda else contextlib.nullcontext():
        if cuda:
            torch.cuda._sleep(100_000_000)
        source.add_(1)
        staging.begin()
        (place,) = staging.copy([source], {}, later=True)
        copies = staging.end()
    copies.make()
    copies.wait()
    source.zero_()
    assert place.device.type == "cpu" and bool((place == 1).all())
