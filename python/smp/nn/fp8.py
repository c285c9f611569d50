"""A linear layer that is whole on its rank, with 8-bit operands."""

from __future__ import annotations

from torch import Tensor, nn

from smp.tensor_parallel.products import product


class Fp8Linear(nn.Linear):
    """An ``nn.Linear`` that multiplies with 8-bit operands.

    It is made of the user's layer, which keeps its parameters, hooks and attributes and gets this
    class. Parameters have the dtype that they had.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Maps ``[*, in]`` to ``[*, out]``, in the dtype of the input."""
        return product(self, input, self.weight, self.bias, splits_in=None)
