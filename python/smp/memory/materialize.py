"""The one place where parameters become real on a device or give up their memory.

Both functions keep the ``Parameter`` object, so optimizers that were made before the model was
wrapped go on with the same parameters.
"""

from __future__ import annotations

import torch
from torch import nn


def make_real(parameter: nn.Parameter, device: torch.device) -> None:
    """Moves a parameter of this rank to ``device``; shape, dtype and object stay.

    Raises:
        ValueError: for a parameter on the meta device, which has no values to move.
    """
    if parameter.is_meta:
        raise ValueError(
            "a parameter is on the meta device and has no values; delayed initialisation is not "
            "available yet in this version: build the model on the CPU"
        )
    with torch.no_grad():
        if parameter.device != device:
            parameter.data = parameter.data.to(device)
        elif not parameter.data.is_contiguous():
            parameter.data = parameter.data.contiguous()


def make_placeholder(parameter: nn.Parameter, device: torch.device) -> None:
    """Frees the memory of a parameter that lives on another rank.

    Shape, dtype and device remain true; all elements share one NaN, so reading them by mistake
    shows in the loss instead of being silently wrong.
    """
    has_nan = parameter.dtype.is_floating_point or parameter.dtype.is_complex
    fill = torch.full((), float("nan") if has_nan else 0, dtype=parameter.dtype, device=device)
    with torch.no_grad():
        parameter.data = fill.expand(parameter.shape)
        parameter.grad = None
