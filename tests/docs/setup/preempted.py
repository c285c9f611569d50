"""The training run of `training.py`; one rank is told to end in the third step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import torch

from tests.docs.setup import training
from tests.docs.setup.training import folder, model, optimizer, smp, train_step

__all__ = ["folder", "loader", "model", "optimizer", "smp", "train_step"]


def _loader() -> Iterator[torch.Tensor]:
    for step, batch in enumerate(training.loader):
        if step == 2 and smp.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        yield batch


loader = _loader()


def after(names: dict[str, Any]) -> None:
    raise AssertionError("the script was to leave")
