"""Linear layers with 8-bit operands on the device, next to decoded numbers on the CPU."""

from __future__ import annotations

import pytest
import torch

from smp._device import fp8_problem
from tests.gpu.device import DEVICE
from tests.reference.fp8 import product

#: Rows, and features on both sides; rows of the second one have to be padded for weight gradients.
SHAPES = [(128, 256, 192), (37, 64, 48)]
# Sums of at most 256 products, of which a GPU may add up with fewer bits, rounded to bfloat16.
TOLERANCE = 2**-6


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_decoded_numbers(scaling: str, shape: tuple[int, int, int]) -> None:
    problem = fp8_problem(torch.device(DEVICE))
    if problem is not None:
        pytest.skip(problem)
    rows, in_features, out_features = shape
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias, grad = (
        torch.randn(size, generator=generator).bfloat16()
        for size in ((rows, in_features), (out_features, in_features), (out_features,),
                     (rows, out_features))
    )  # fmt: skip
    results = []
    for device in (DEVICE, "reference"):
        place = "cpu" if device == "reference" else device
        operands = [t.to(place, copy=True).requires_grad_() for t in (x, weight, bias)]
        if device == "reference":
            y = product(*operands, scaling)
        else:
            y = torch.ops.smp.fp8_linear(*operands, scaling)
        y.backward(grad.to(place))
        results.append([t.detach().cpu().double() for t in (y, *(p.grad for p in operands))])
    for name, got, expected in zip(("y", "dx", "dw", "db"), *results, strict=True):
        off = (got - expected).abs().max() / expected.abs().max()
        assert off <= TOLERANCE, f"{name}: {off}"
