"""Replaces PyTorch's own functions from the first wrapped model to the shutdown."""

from __future__ import annotations

import functools

from smp.model.torch_training.clipping import TorchClipping
from smp.model.torch_training.grad_scaler import TorchGradScaler
from smp.model.torch_training.optimizers import TorchOptimizers
from smp.model.torch_training.part_gradients import PartGradients
from smp.model.torch_training.plain_backward import PlainBackward
from smp.precision.shown_gradients import CutParameter
from smp.world import runtime
from smp.world.terms import terms_now


def take_over(current: runtime.Runtime) -> None:
    """Makes PyTorch's functions work on distributed models; once in a run.

    Args:
        current: the runtime, whose models count.

    Raises:
        RuntimeError: this release of torch has other functions.
    """
    if current.torch_optimizers is not None:
        return
    current.torch_optimizers = TorchOptimizers(current)
    current.rank.terms_at = functools.partial(terms_now, current)
    PlainBackward(current)
    sizes, config = current.rank.sizes, current.rank.config
    # Otherwise each rank has whole gradients, as PyTorch's functions expect.
    has_parts = sizes["mp"] > 1 or sizes["shard"] > 1 or config.half_dtype is not None
    has_parts |= config.update_in_backward  # or none
    TorchClipping(current, has_parts)
    if has_parts:
        TorchGradScaler(current)
    if sizes["mp"] > 1 or sizes["shard"] > 1:
        current.part_gradients = PartGradients(current)
        CutParameter.steps = current.steps
        current.on_shutdown(lambda: setattr(CutParameter, "steps", None))
