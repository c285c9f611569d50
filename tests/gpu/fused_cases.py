"""Cases of all operators of `smp.nn.functional`, with arguments for one width."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from smp.nn import functional as fused
from tests.reference.fused_ops import make

Case = tuple[Callable[..., Tensor], list[Tensor]]

# Odd and even, for a warp, a block and a large block per row.
WIDTHS = [1, 7, 64, 1030, 1536, 2049, 9000, 16384]


def cases(n: int) -> dict[str, Case]:
    """Name to the operator and the arguments that have gradients, in float64 on the CPU.

    Args:
        n: elements of a row.
    """
    x, vector, other = make(37, n), make(n, seed=1), make(37, n, seed=2)
    scores, queries = make(2, 3, 5, n), min(n, 5)
    mask = make(2, 1, queries, n, seed=3)
    pairs = max(1, min(n // 3, 512))
    heads = make(2, 3, 2, 2 * pairs + (8 if n % 2 == 0 else 3))
    angles = make(1, 3, pairs, seed=4)
    targets = torch.arange(37) * 5 % n
    targets[3] = -100

    def softmax(s: Tensor, causal: bool, p: float) -> Tensor:
        slopes = torch.tensor([0.5, 0.25, 0.125], device=s.device)
        window = 40 if causal else None
        return fused.scaled_masked_softmax(
            s[:, :, :queries], mask.to(s.device, s.dtype), 0.3, causal, window, slopes, p, 7
        )

    def rotate(x: Tensor, interleaved: bool) -> Tensor:
        cos, sin = angles.cos().to(x.device), angles.sin().to(x.device)
        return fused.rotary(x, cos, sin, 2 * pairs, interleaved)

    return {
        "layer_norm": (lambda x, w, b: fused.layer_norm(x, w, b, 1e-3), [x, vector, vector]),
        "rms_norm": (lambda x, w: fused.rms_norm(x, w, 1e-3), [x, vector]),
        "bias_gelu": (lambda x, b: fused.bias_gelu(x, b), [x * 3, vector]),
        "bias_gelu tanh": (lambda x, b: fused.bias_gelu(x, b, "tanh"), [x * 3, vector]),
        "softmax": (lambda s: softmax(s, False, 0.0), [scores]),
        "softmax causal": (lambda s: softmax(s, True, 0.2), [scores]),
        "bias_dropout_residual": (
            lambda x, b, r: fused.bias_dropout_residual(x, b, r, 0.3, 99),
            [x, vector, other],
        ),
        "fp32 residual": (
            lambda x, b, r: fused.bias_dropout_residual(x, b, r, 0.3, 99, True),
            [x, vector, other],
        ),
        "rotary": (lambda x: rotate(x, False), [heads]),
        "rotary interleaved": (lambda x: rotate(x, True), [heads]),
        "cross_entropy": (
            lambda x: fused.cross_entropy(x, targets.to(x.device), -100, 0.1),
            [x * 4],
        ),
    }


def run(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The result and the gradients of the inputs.

    The gradient of the result is the same for all dtypes, up to rounding.
    """
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    weights = make(*y.shape, seed=8).bfloat16().to(y.device, y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, weights)]
