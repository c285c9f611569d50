"""Parts and masters of the parameters of a model that this rank keeps and updates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_HOLDING = "_smp_holding"
_MASTER_OF = "_smp_master_of"


@dataclass
class Holding:
    """The part of a trainable parameter that this rank updates.

    Attributes:
        name: name in the whole model.
        parameter: parameter of the user's model.
        begin, numel: elements ``[begin, begin + numel)`` of the flattened parameter; none of them
            if ``numel`` is 0.
        piece: memory of these elements in the model's dtype: 1-D, or the parameter's own tensor if
            all of it is held.
        master: leaf that the optimizer updates, float32 or float64; it has the parameter's shape if
            all of it is held, else it is 1-D. It shares memory with ``piece`` unless that has 16
            bits. The reducer sets its ``.grad``.
    """

    name: str
    parameter: nn.Parameter
    begin: int
    numel: int
    piece: Tensor
    master: nn.Parameter

    def __reduce__(self) -> Any:
        return type(None), ()  # files that save a parameter do not have its state in training

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole parameter, or of its slice on this tensor-parallel rank."""
        return self.parameter.shape

    @property
    def is_whole(self) -> bool:
        return self.numel == self.parameter.numel() and self.master.shape == self.parameter.shape

    @property
    def has_copy(self) -> bool:
        """True if the piece is a copy of the master, to be written after each update."""
        return self.piece.dtype != self.master.dtype


def attach(holding: Holding) -> None:
    """Attaches a holding to its parameter and to its master."""
    setattr(holding.parameter, _HOLDING, holding)
    setattr(holding.master, _MASTER_OF, holding)


def holding_of(parameter: Tensor) -> Holding | None:
    """Returns the holding of a parameter; None if the optimizer updates the parameter itself."""
    holding = getattr(parameter, _HOLDING, None)
    assert holding is None or isinstance(holding, Holding)
    return holding


def holding_with_master(tensor: Tensor) -> Holding | None:
    """Returns the holding whose master a tensor is; None for other tensors."""
    holding = getattr(tensor, _MASTER_OF, None)
    assert holding is None or isinstance(holding, Holding)
    return holding


def master_of(parameter: Tensor) -> Tensor:
    """Returns the tensor that is updated instead of a parameter and has its gradient."""
    holding = holding_of(parameter)
    return parameter if holding is None else holding.master


def model_parameter_of(tensor: Tensor) -> Tensor:
    """Returns the model's parameter for a tensor that an optimizer updates."""
    holding = holding_with_master(tensor)
    return tensor if holding is None else holding.parameter


def refresh_piece(holding: Holding) -> None:
    """Writes the rounded master into the model."""
    if holding.has_copy:
        with torch.no_grad():
            holding.piece.copy_(holding.master.view(holding.piece.shape))


def write_values(piece: Tensor, master: Tensor | None, values: Tensor) -> None:
    """Writes values to the model and to the master; the two may share their memory.

    A master is not changed if it rounds to the given 16-bit value: then the master is the more
    precise of the two. So the order in which a model and its optimizer are loaded does not matter.

    Args:
        piece, master: tensors of a holding; None as master of a frozen parameter.
        values: the same number of values, of any floating dtype.
    """
    with torch.no_grad():
        precise = values
        if master is not None and values.dtype.itemsize < 4:
            dtype = piece.dtype if piece.dtype != master.dtype else values.dtype
            precise = _keep_digits(master, values.to(master.device).view(master.shape), dtype)
        if master is None or piece.dtype != master.dtype:
            piece.copy_(values.view(piece.shape))
        if master is not None:
            master.copy_(precise.view(master.shape))


def _keep_digits(known: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns known values where they round to the given 16-bit values, else the given ones."""
    return torch.where(known.to(dtype) == values.to(dtype), known, values.to(known.dtype))


def cut(whole: Tensor, holding: Holding) -> Tensor:
    """Returns a holding's elements of a tensor like the parameter, in its master's shape."""
    end = holding.begin + holding.numel
    return whole.reshape(-1)[holding.begin : end].view(holding.master.shape)


def load_value(target: Tensor, value: Tensor) -> None:
    """Copies a value into a parameter or buffer of a model, and into the parameter's master."""
    holding = holding_of(target)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        if holding is not None and not holding.has_copy and value.dtype.itemsize < 4:
            value = _keep_digits(target, value.to(target.device), value.dtype)
        target.copy_(value)
    if holding is not None and holding.has_copy and holding.numel:
        write_values(holding.piece, holding.master, cut(value, holding))


def reload_masters(holdings: Iterable[Holding]) -> None:
    """Copies values that were written to the model into masters (see `write_values`)."""
    for holding in holdings:
        if holding.has_copy and holding.numel:
            write_values(holding.piece, holding.master, holding.piece.detach())


def updates_some(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> bool:
    """Returns whether an optimizer updates one of these parameters of models, or its master."""
    return not {model_parameter_of(p) for p in parameters_of(optimizer)}.isdisjoint(parameters)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the parameters of an optimizer by their index in its state dicts."""
    unique = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    return list(unique.values())
