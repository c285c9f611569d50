"""Builds, without weights, the form of a model that is split over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from smp.nn import DistributedEmbedding, DistributedLinear, huggingface
from smp.replacement import replace_marked, set_tensor_parallelism
from smp.tensor_parallel.registry import registration_of
from smp.world import runtime

# Single products are in every model; forms that replace several modules matter here.
_SINGLE = (DistributedLinear, DistributedEmbedding)


@contextmanager
def split_form(module: nn.Module) -> Iterator[nn.Module | None]:
    """Replaces the modules of a model by their distributed forms, on one rank with full sizes.

    The form lives inside the block: this process is a world of one rank there.

    Args:
        module: model on the meta device, which must not be used afterwards if it has a form.

    Yields:
        the model; None if no layer of it has a form, and its own code is split in place.
    """
    huggingface.register_available()
    if not any(_has_form(part) for part in module.modules()):
        yield None
        return
    started = not runtime.is_initialized()
    if started:
        runtime.init({"ddp": True})
    try:
        set_tensor_parallelism(module)
        form, _ = replace_marked(module, torch.device("meta"), tries_plans=False)
        yield form.train()
    finally:
        if started:
            runtime.shutdown()


def _has_form(module: nn.Module) -> bool:
    registration = registration_of(module)
    return registration is not None and registration.dist_module not in _SINGLE
