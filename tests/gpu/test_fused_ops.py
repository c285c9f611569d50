"""The operators of `smp.nn.functional` on the device next to those of the CPU in float64."""

from __future__ import annotations

import pytest
import torch

from smp.nn import functional as fused
from tests.gpu.device import DEVICE, needs_cuda
from tests.gpu.fused_cases import WIDTHS, cases, run
from tests.reference.fused_ops import make

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
# Operators whose results are never in 16 bits.
IN_FP32 = ("fp32 residual", "cross_entropy")


@pytest.mark.sample(keep=16)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", sorted(cases(8)))
def test_the_device_gives_what_the_cpu_gives_in_float64(
    name: str, width: int, dtype: torch.dtype
) -> None:
    if (DEVICE, dtype) == ("cpu", torch.float64):
        pytest.skip("no CUDA device: this is the reference itself")
    function, inputs = cases(width)[name]
    inputs = [x.to(dtype) for x in inputs]
    want = run(function, [x.double() for x in inputs])
    got = run(function, [x.to(DEVICE) for x in inputs])
    for index, (own, exact) in enumerate(zip(got, want, strict=True)):
        is_wide = name in IN_FP32 and index == 0
        kind = torch.promote_types(dtype, torch.float32) if is_wide else dtype
        assert own.dtype == kind and own.device.type == DEVICE
        atol = TOLERANCE[dtype] * max(1.0, float(exact.abs().max()))
        torch.testing.assert_close(own.cpu().double(), exact, rtol=0.0, atol=atol)


@needs_cuda
def test_dropout_masks_are_the_same_on_both_devices() -> None:
    x = torch.ones(70, 3001)
    assert torch.equal(fused.dropout(x.cuda(), 0.3, 12).cpu(), fused.dropout(x, 0.3, 12))


def test_equal_runs_give_equal_bits() -> None:
    rows = 4096 if DEVICE == "cuda" else 64
    x, vector = (t.float().to(DEVICE) for t in (make(rows, 1024), make(1024)))
    first, second = (run(lambda x, v: fused.bias_gelu(x, v), [x, vector]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@needs_cuda
def test_targets_outside_of_the_vocabulary_give_nan() -> None:
    loss = fused.cross_entropy(torch.zeros(3, 5).cuda(), torch.tensor([0, 5, -100]).cuda())
    assert loss.isnan().tolist() == [False, True, False]


@needs_cuda
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
