"""What a model becomes where it is split over tensor-parallel ranks, built without weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from smp.nn import DistributedEmbedding, DistributedLinear, huggingface
from smp.replacement import replace_marked, set_tensor_parallelism
from smp.tensor_parallel.registry import registration_of
from smp.world import runtime

# Single products, which models are full of: what matters here are forms of more.
_SINGLE = (DistributedLinear, DistributedEmbedding)


@contextmanager
def split_form(module: nn.Module) -> Iterator[nn.Module | None]:
    """The distributed form of a model, on one rank: fused operators, the same sizes.

    The form lives inside of the block: this process is a world of one there.

    Args:
        module: on the meta device; of no further use if it has a form.

    Yields:
        the model; None where no layer of it has a form, and its own code is split in place.
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
