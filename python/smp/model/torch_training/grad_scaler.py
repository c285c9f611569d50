"""``torch.amp.GradScaler`` where a gradient may overflow on another rank.

PyTorch's scaler looks at the gradients of its own rank. Then one rank of a pipeline would skip an
update that the others make, and would later divide by another scale than the loss was multiplied
with. So while models of which ranks have parts are wrapped, these ranks decide together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smp.model.torch_training.known import has_known
from smp.precision.grad_norm import refuse_without_gradients
from smp.precision.holdings import parameters_of
from smp.world import device_numbers, runtime
from smp.world.rank import Rank

Found = dict[torch.device, Tensor]


def agreed(rank: Rank, found: Found, found_inf: Tensor) -> Found:
    """Returns whether some rank that skips together with this one has infinite or NaN gradients.

    Collective over the ranks of a replica (the MP group), and over all ranks if the optimizer state
    is sharded. The host does not wait for the device.

    Args:
        rank: rank of this process.
        found: flag of this rank by device, nonzero for infinite or NaN; empty without gradients.
        found_inf: a number on the device of the scale.
    """
    if not found:  # no gradient on this rank; PyTorch needs an entry anyway
        found = {found_inf.device: torch.zeros_like(found_inf)}
    own = torch.stack([device_numbers.moved(v, found_inf.device) for v in found.values()])
    kinds = device_numbers.skipping_kinds(rank)
    anywhere = device_numbers.maxima(rank, own.amax(0).reshape(1), kinds).reshape(())
    return {device: device_numbers.moved(anywhere, device).clone() for device in found}


class TorchGradScaler:
    """Makes PyTorch's scaler agree with other ranks until the run is shut down.

    A subclass with ``agrees_itself`` is not changed.

    Args:
        current: the runtime, whose models count.
    """

    def __init__(self, current: runtime.Runtime) -> None:
        rank, wrapped = current.rank, current.wrapped
        theirs = torch.amp.GradScaler._unscale_grads_

        def unscale(
            scaler: torch.amp.GradScaler,
            optimizer: torch.optim.Optimizer,
            inv_scale: Tensor,
            found_inf: Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> Found:
            if has_known(wrapped, parameters_of(optimizer)):
                refuse_without_gradients(rank, "a check of all gradients by a GradScaler")
                if wrapped.uneven is not None:
                    wrapped.uneven.refuse("a GradScaler")
            found: Found = theirs(scaler, optimizer, inv_scale, found_inf, *args, **kwargs)
            is_ours = not getattr(scaler, "agrees_itself", False)
            if is_ours and has_known(wrapped, parameters_of(optimizer)):
                return agreed(rank, found, found_inf)
            return found

        def restore() -> None:
            torch.amp.GradScaler._unscale_grads_ = theirs  # type: ignore[method-assign]

        torch.amp.GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign, assignment]
        current.on_shutdown(restore)
