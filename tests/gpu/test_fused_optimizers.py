"""`smp.optimizers` on CUDA next to the CPU. Skipped without a device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from smp.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedOptimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# Empty, odd, around a chunk, over several chunks, and more arrays than one launch takes.
SIZES = [0, 1, 3, 513, 65535, 65536, 65537, 300_003] + [7] * 90
CASES: list[tuple[type[FusedOptimizer], dict[str, object]]] = [
    (FusedAdam, {"weight_decay": 0.1}),
    (FusedAdam, {"weight_decay": 0.1, "adam_w_mode": False, "bias_correction": False}),
    (FusedLAMB, {}),
    (FusedLAMB, {"max_grad_norm": None, "weight_decay": 0.0, "use_nvlamb": True}),
    (FusedNovoGrad, {"weight_decay": 0.1}),
    (FusedNovoGrad, {"norm_type": 0, "init_zero": True, "reg_inside_moment": True}),
]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}


def parameters(dtype: torch.dtype, device: str, misaligned: bool = False) -> list[nn.Parameter]:
    result = []
    for i, n in enumerate(SIZES):
        generator = torch.Generator().manual_seed(i)
        values = torch.randn(n + 1, generator=generator, dtype=torch.float64).to(device, dtype)
        result.append(nn.Parameter(values[1:] if misaligned else values[1:].clone()))
    return result


def set_grads(params: Sequence[nn.Parameter], step: int, scale: float) -> None:
    for i, p in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * step + i)
        g = torch.randn(p.numel(), generator=generator, dtype=torch.float64) * scale
        p.grad = g.to(p.device, p.dtype)


def train(
    cls: type[FusedOptimizer], options: dict[str, object], params: list[nn.Parameter]
) -> tuple[FusedOptimizer, list[Tensor]]:
    optimizer = cls(params, lr=0.05, **options)  # type: ignore[arg-type]
    device = params[0].device
    for step in range(4):
        set_grads(params, step, 256.0)
        optimizer.grad_scale = torch.tensor(256.0, device=device)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.tensor(  # type: ignore[attr-defined]
            1.0 if step == 2 else 0.0, device=device
        )
        optimizer.step()
    return optimizer, [p.detach().cpu() for p in params]


@pytest.mark.parametrize(("cls", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("misaligned", [False, True])
def test_cuda_gives_what_the_cpu_gives(
    cls: type[FusedOptimizer], options: dict[str, object], dtype: torch.dtype, misaligned: bool
) -> None:
    _, want = train(cls, options, parameters(dtype, "cpu"))
    params = parameters(dtype, "cuda", misaligned)
    optimizer, got = train(cls, options, params)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert float(optimizer.state[params[1]]["step"]) == 3.0
    assert not torch.equal(got[3], parameters(dtype, "cpu")[3])


@pytest.mark.parametrize("cls", [FusedAdam, FusedLAMB, FusedNovoGrad])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_copies_are_the_rounded_parameters(cls: type[FusedOptimizer], half: torch.dtype) -> None:
    params = parameters(torch.float32, "cuda")
    for p in params:
        p._smp_copy = torch.zeros(p.shape, dtype=half, device="cuda")  # type: ignore[attr-defined]
    train(cls, {}, params)
    for p in params:
        assert torch.equal(p._smp_copy, p.detach().to(half))  # type: ignore[attr-defined]


@pytest.mark.parametrize("cls", [FusedAdam, FusedLAMB, FusedNovoGrad])
def test_equal_runs_give_equal_bits_and_nothing_waits(cls: type[FusedOptimizer]) -> None:
    first = train(cls, {}, parameters(torch.float32, "cuda"))[1]
    params = parameters(torch.float32, "cuda")
    optimizer, second = train(cls, {}, params)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    set_grads(params, 5, 256.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_norms_and_infinities(dtype: torch.dtype) -> None:
    tensors = [p.detach().to(dtype) for p in parameters(torch.float64, "cuda")]
    on_cpu = [t.cpu() for t in tensors]
    for op in (torch.ops.smp.sums_of_squares, torch.ops.smp.max_abs, torch.ops.smp.sum_of_squares):
        torch.testing.assert_close(op(tensors).cpu(), op(on_cpu), rtol=1e-12, atol=0.0)
    assert float(torch.ops.smp.found_nonfinite(tensors)) == 0.0
    squares = torch.ops.smp.sum_of_squares(tensors)
    scale = torch.tensor(8.0, device="cuda")
    for a, b in zip(
        torch.ops.smp.clip_divisor(squares, 1.0, scale),
        torch.ops.smp.clip_divisor(squares.cpu(), 1.0, scale.cpu()),
        strict=True,
    ):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-12, atol=0.0)
    for bad in (float("inf"), float("nan")):
        tensors[7][300_000] = bad
        assert float(torch.ops.smp.found_nonfinite(tensors)) == 1.0
        found = torch.ops.smp.clip_divisor(torch.ops.smp.sum_of_squares(tensors), 1.0)[2]
        assert float(found) == 1.0


def test_large_float_gradients_do_not_overflow() -> None:
    huge = [torch.full((1000,), 3e30, device="cuda")]
    assert float(torch.ops.smp.sum_of_squares(huge)) == pytest.approx(9e63, rel=1e-6)
