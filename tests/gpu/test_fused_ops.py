"""The operators of `smp.nn.functional` on CUDA next to the CPU. Skipped without a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from smp.nn import functional as fused

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
# Odd and even, for a warp, a block and a large block per row.
WIDTHS = [1, 7, 64, 1030, 1536, 2049, 9000, 16384]


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cases(n: int) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Name to the operator and the arguments that have gradients."""
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
        "bias_gelu": (lambda x, b: fused.bias_gelu(x * 3, b), [x, vector]),
        "bias_gelu tanh": (lambda x, b: fused.bias_gelu(x * 3, b, "tanh"), [x, vector]),
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
            lambda x: fused.cross_entropy(x * 4, targets.to(x.device), -100, 0.1),
            [x],
        ),
    }


def run(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    weights = make(*y.shape, seed=8).to(y.device, y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, weights)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", sorted(cases(8)))
def test_cuda_gives_what_the_cpu_gives(name: str, width: int, dtype: torch.dtype) -> None:
    function, inputs = cases(width)[name]
    inputs = [x.to(dtype) for x in inputs]
    want = run(function, inputs)
    got = run(function, [x.cuda() for x in inputs])
    for own, other in zip(got, want, strict=True):
        assert own.dtype == other.dtype and own.device.type == "cuda"
        scale = max(1.0, float(other.abs().max()))
        atol = TOLERANCE[dtype] * scale
        torch.testing.assert_close(own.cpu().double(), other.double(), rtol=0.0, atol=atol)


def test_dropout_masks_are_the_same_on_both_devices() -> None:
    x = torch.ones(70, 3001)
    assert torch.equal(fused.dropout(x.cuda(), 0.3, 12).cpu(), fused.dropout(x, 0.3, 12))


def test_equal_runs_give_equal_bits() -> None:
    x, vector = make(4096, 1024).float().cuda(), make(1024).float().cuda()
    first, second = (run(lambda x, v: fused.bias_gelu(x, v), [x, vector]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_targets_outside_of_the_vocabulary_give_nan() -> None:
    loss = fused.cross_entropy(torch.zeros(3, 5).cuda(), torch.tensor([0, 5, -100]).cuda())
    assert loss.isnan().tolist() == [False, True, False]


def test_another_stream_is_waited_for() -> None:
    x = torch.zeros(1 << 22, device="cuda").view(4096, 1024)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(50):
            x += 1
        y = fused.bias_dropout_residual(x, None, x, 0.0, 0)
        y *= 2
    stream.synchronize()
    assert torch.equal(y, torch.full_like(y, 200))
