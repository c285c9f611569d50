"""Gives a model the dtypes of 16-bit training while it is traced without a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from smp.modules.training_dtypes import plan_dtypes
from smp.precision.operands import OperandCasts


@contextlib.contextmanager
def computing_in(root: nn.Module, half: torch.dtype | None) -> Iterator[None]:
    """Casts the parameters and buffers of a model as a run does, and operands inside the block.

    Args:
        root: the model, on the meta device.
        half: dtype of 16 bits, or None: the model stays as it is.
    """
    if half is None:
        yield
        return
    plan_dtypes(root, half).cast(root)
    casts = OperandCasts(root)
    casts.begin()
    try:
        yield
    finally:
        casts.close()
