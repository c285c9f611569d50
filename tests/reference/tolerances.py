"""Tolerances of comparisons.

The difference of two tensors is ``max|a - ref| / max(max|ref|, floor)``; the
floor is a thousandth of the largest reference value of the same kind (all
gradients of the step, or all parameters), so that a tensor which is zero up to
rounding does not blow the quotient up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
FLOOR_FRACTION = 1e-3


@dataclass(frozen=True)
class MixedTolerance:
    """Limits of differences between runs of the same precision that sum in other orders.

    Losses are compared by `relative_difference`; the others by `distance`, since the largest of
    thousands of rounding errors says little. Masters are compared by how they changed: their
    values hardly do.
    """

    losses: float
    grads: float  # of the worst parameter
    norms: float
    changes: float  # of all parameters together


# A small GPT-J in 16 bits differs from itself in float32 by losses 2e-4, gradients 4e-3, changes
# 3e-3 in fp16, and by 1.1e-3, 3e-2, 2e-2 in bf16, whose steps are eight times larger. Two runs of
# one precision that round in other places are apart by about as much: the limits are two to three
# times that. A microbatch too much or too few makes a difference of more than 0.3.
MIXED_TOLERANCE = {
    torch.float32: MixedTolerance(losses=1e-5, grads=1e-4, norms=1e-5, changes=1e-4),
    torch.float16: MixedTolerance(losses=6e-4, grads=1e-2, norms=2e-3, changes=1e-2),
    torch.bfloat16: MixedTolerance(losses=4e-3, grads=8e-2, norms=2e-2, changes=6e-2),
}


# Roundings of a transformer block, one after the other: its norms, the products of attention and
# of the MLP, softmax, activation, biases and residual sums.
ROUNDINGS_PER_BLOCK = 12


def half_loss_tolerance(
    dtype: torch.dtype, loss: float, *, num_blocks: int, num_terms: int
) -> float:
    """Returns how far the loss of a model in 16 bits may be from its loss in float32.

    A rounding is off by at most half a unit in the last place, evenly spread, and n of them in
    series by sqrt(n / 3) halves in the mean square, relative to the scores. The mean over
    independent terms is off by as much divided by the root of their number. Three times this is
    allowed, so that it does not matter which kernel of which processor rounds where. Updates add
    little: their errors are as many directions as there are parameters.

    Args:
        dtype: dtype of the parameters.
        loss: a cross entropy in float32; the scores are about as large.
        num_blocks: number of blocks of the transformer.
        num_terms: tokens that the mean is over.
    """
    num_roundings = num_blocks * ROUNDINGS_PER_BLOCK
    half_unit = torch.finfo(dtype).eps / 2
    return 3 * half_unit * math.sqrt(num_roundings / 3 / num_terms) * abs(loss)


def relative_difference(a: torch.Tensor, ref: torch.Tensor, floor: float = 0.0) -> float:
    """``max|a - ref| / max(max|ref|, floor)``; infinite when shapes, dtypes or NaNs differ."""
    if a.shape != ref.shape or a.dtype != ref.dtype:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    a64, ref64 = a.detach().double().cpu(), ref.detach().double().cpu()
    difference = (a64 - ref64).abs().max().item()
    if difference != difference:  # NaN on one side at least
        return float("inf")
    return difference / max(ref64.abs().max().item(), floor, 1e-300)


def distance(a: torch.Tensor, ref: torch.Tensor, floor: float = 0.0) -> float:
    """``|a - ref| / max(|ref|, floor)`` in L2 norms; infinite when shapes or NaNs differ."""
    if a.shape != ref.shape:
        return float("inf")
    a64, ref64 = a.detach().double().cpu(), ref.detach().double().cpu()
    difference = (a64 - ref64).norm().item()
    if difference != difference:  # NaN on one side at least
        return float("inf")
    return difference / max(ref64.norm().item(), floor, 1e-300)


def largest(tensors: Mapping[str, torch.Tensor | None]) -> float:
    """The largest magnitude in a dict of tensors."""
    return max((t.abs().max().item() for t in tensors.values() if t is not None), default=0.0)


def assert_close(
    actual: Mapping[str, torch.Tensor | None],
    expected: Mapping[str, torch.Tensor | None],
    dtype: torch.dtype,
    what: str,
    tolerance: float | None = None,
) -> float:
    """Compares dicts by name and returns the largest difference found.

    Args:
        actual, expected: tensors or None, by name.
        dtype: dtype of the run; sets the tolerance unless ``tolerance`` does.
        what: words for failures.
        tolerance: largest difference.
    """
    limit = TOLERANCE[dtype] if tolerance is None else tolerance
    assert set(actual) == set(expected), (
        f"{what}: names differ: only here {sorted(set(actual) - set(expected))}, "
        f"only in the reference {sorted(set(expected) - set(actual))}"
    )
    floor = FLOOR_FRACTION * largest(expected)
    differences: dict[str, float] = {}
    for name, ref in expected.items():
        value = actual[name]
        if ref is None or value is None:
            assert ref is None and value is None, (
                f"{what} {name}: {'None' if value is None else 'a tensor'} here, "
                f"{'None' if ref is None else 'a tensor'} in the reference"
            )
            continue
        differences[name] = relative_difference(value, ref, floor)
    worst = sorted(differences, key=lambda name: -differences[name])[:5]
    top = differences[worst[0]] if worst else 0.0
    assert top <= limit, f"{what} differ from one process (limit {limit}): " + (
        ", ".join(f"{name} {differences[name]:.2e}" for name in worst)
    )
    return top
