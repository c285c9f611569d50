"""`smp.optimizers` on the device next to the CPU in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from smp.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedOptimizer
from tests.gpu.device import DEVICE, waiting_is_an_error

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


def rounded(n: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers that ``dtype`` can hold, in float64 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype).double()


def parameters(
    dtype: torch.dtype,
    device: str = DEVICE,
    misaligned: bool = False,
    values: torch.dtype | None = None,
) -> list[nn.Parameter]:
    """Makes a parameter of each size.

    Args:
        misaligned: addresses are no multiples of 16 bytes.
        values: dtype to which the values are rounded; ``dtype`` if None.
    """
    result = []
    for i, n in enumerate(SIZES):
        whole = rounded(n + 1, i, values or dtype).to(device, dtype)
        result.append(nn.Parameter(whole[1:] if misaligned else whole[1:].clone()))
    return result


def set_grads(
    params: Sequence[nn.Parameter], step: int, scale: float, values: torch.dtype | None = None
) -> None:
    for i, p in enumerate(params):
        grad = rounded(p.numel(), 1000 * step + i, values or p.dtype) * scale
        p.grad = grad.to(p.device, p.dtype)


def train(
    cls: type[FusedOptimizer],
    options: dict[str, object],
    params: list[nn.Parameter],
    values: torch.dtype | None = None,
) -> tuple[FusedOptimizer, list[Tensor]]:
    optimizer = cls(params, lr=0.05, **options)  # type: ignore[arg-type]
    device = params[0].device
    for step in range(4):
        set_grads(params, step, 256.0, values)
        optimizer.grad_scale = torch.tensor(256.0, device=device)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.tensor(  # type: ignore[attr-defined]
            1.0 if step == 2 else 0.0, device=device
        )
        optimizer.step()
    return optimizer, [p.detach().cpu() for p in params]


@pytest.mark.sample(keep=6)
@pytest.mark.parametrize(("cls", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("misaligned", [False, True])
def test_the_device_gives_what_the_cpu_gives_in_float64(
    cls: type[FusedOptimizer], options: dict[str, object], dtype: torch.dtype, misaligned: bool
) -> None:
    if (DEVICE, dtype, misaligned) == ("cpu", torch.float64, False):
        pytest.skip("no CUDA device: this is the reference itself")
    _, want = train(cls, options, parameters(torch.float64, "cpu", values=dtype), dtype)
    params = parameters(dtype, misaligned=misaligned)
    optimizer, got = train(cls, options, params)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(
            a.double(), b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], check_dtype=False
        )
    assert float(optimizer.state[params[1]]["step"]) == 3.0
    assert not torch.equal(got[3], parameters(dtype, "cpu")[3])


@pytest.mark.parametrize("cls", [FusedAdam, FusedLAMB, FusedNovoGrad])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_copies_are_the_rounded_parameters(cls: type[FusedOptimizer], half: torch.dtype) -> None:
    params = parameters(torch.float32)
    for p in params:
        p._smp_copy = torch.zeros(p.shape, dtype=half, device=DEVICE)  # type: ignore[attr-defined]
    train(cls, {}, params)
    for p in params:
        assert torch.equal(p._smp_copy, p.detach().to(half))  # type: ignore[attr-defined]


@pytest.mark.parametrize("cls", [FusedAdam, FusedLAMB, FusedNovoGrad])
def test_equal_runs_give_equal_bits_and_nothing_waits(cls: type[FusedOptimizer]) -> None:
    first = train(cls, {}, parameters(torch.float32))[1]
    params = parameters(torch.float32)
    optimizer, second = train(cls, {}, params)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    set_grads(params, 5, 256.0)
    with waiting_is_an_error():
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_norms_and_infinities(dtype: torch.dtype) -> None:
    tensors = [p.detach().to(dtype) for p in parameters(torch.float64)]
    exact = [t.cpu().double() for t in tensors]
    squares = [t.square().sum() for t in exact]
    largest = [t.abs().max() if t.numel() else torch.zeros((), dtype=torch.float64) for t in exact]
    ops = torch.ops.smp
    total = ops.sum_of_squares(tensors)
    assert total.device.type == DEVICE
    for got, want in (
        (ops.sums_of_squares(tensors), torch.stack(squares)),
        (ops.max_abs(tensors), torch.stack(largest)),
        (total, torch.stack(squares).sum()),
    ):
        torch.testing.assert_close(got.cpu().double(), want, rtol=1e-12, atol=0.0)
    assert float(ops.found_nonfinite(tensors)) == 0.0
    divisor, norm, found = ops.clip_divisor(total, 1.0, torch.tensor(8.0, device=DEVICE))
    own_norm = math.sqrt(sum(squares)) / 8
    assert float(norm) == pytest.approx(own_norm, rel=1e-12)
    # The loss scale, times what `torch.nn.utils.clip_grad_norm_` divides by.
    assert float(divisor) == pytest.approx(8 * max(1.0, own_norm + 1e-6), rel=1e-12)
    assert float(found) == 0.0
    for bad in (float("inf"), float("nan")):
        tensors[7][300_000] = bad
        assert float(ops.found_nonfinite(tensors)) == 1.0
        assert float(ops.clip_divisor(ops.sum_of_squares(tensors), 1.0)[2]) == 1.0


def test_large_float_gradients_do_not_overflow() -> None:
    huge = [torch.full((1000,), 3e30, device=DEVICE)]
    assert float(torch.ops.smp.sum_of_squares(huge)) == pytest.approx(9e63, rel=1e-6)
