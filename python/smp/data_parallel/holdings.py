"""What this rank keeps and updates of the parameters of its model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

_HOLDING = "_smp_holding"


@dataclass
class Holding:
    """The part of a trainable parameter that this rank updates.

    Attributes:
        name: in the whole model.
        parameter: of the user's model.
        begin, numel: elements ``[begin, begin + numel)`` of the flattened parameter; none of them
            if ``numel`` is 0.
        piece: the memory of these elements in the model's dtype: 1-D, or the parameter's own
            tensor where all of it is held.
        master: leaf that the optimizer updates, float32 or float64, of the parameter's shape where
            all of it is held, else 1-D. Shares memory with ``piece`` unless that has 16 bits. The
            reducer sets its ``.grad``.
    """

    name: str
    parameter: nn.Parameter
    begin: int
    numel: int
    piece: Tensor
    master: nn.Parameter

    @property
    def is_whole(self) -> bool:
        return self.numel == self.parameter.numel() and self.master.shape == self.parameter.shape

    @property
    def has_copy(self) -> bool:
        """Is the piece a copy of the master, to be written after each update?"""
        return self.piece.dtype != self.master.dtype


def attach(holding: Holding) -> None:
    """Makes a parameter know its holding."""
    setattr(holding.parameter, _HOLDING, holding)


def holding_of(parameter: Tensor) -> Holding | None:
    """None where the optimizer updates the parameter itself."""
    holding = getattr(parameter, _HOLDING, None)
    assert holding is None or isinstance(holding, Holding)
    return holding
