"""`torch.ops.smp.sum_of_squares`, `scale_`, `clip_divisor` and `update_loss_scale_`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from smp.precision import DynamicLossScaler
from tests.reference.loss_scale import scale_trace

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
ops = torch.ops.smp


def make(dtype: torch.dtype, device: str, sizes: tuple[int, ...] = (0, 1, 7, 1023)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(n, generator=generator).to(device, dtype) for n in sizes]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_squares_matches_torch_in_double(dtype: torch.dtype, device: str) -> None:
    tensors = make(dtype, device)
    expected = sum(float(t.double().square().sum()) for t in tensors)
    result = ops.sum_of_squares(tensors)
    assert result.dtype == torch.float64 and result.shape == () and result.device.type == device
    assert expected > 100
    assert float(result) == pytest.approx(expected, rel=1e-12 if device == "cpu" else 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_sum_of_squares_takes_dtypes_together_and_any_strides(device: str) -> None:
    tensors = [make(dtype, device)[-1] for dtype in DTYPES]
    tensors += [tensors[0][::3], tensors[1].view(3, 11, 31).permute(2, 0, 1)]
    tensors.append(torch.full((1,), 2.0, device=device).expand(50))
    expected = sum(float(t.double().square().sum()) for t in tensors)
    assert float(ops.sum_of_squares(tensors)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_sum_of_squares_of_many_large_tensors_is_right_and_repeatable(device: str) -> None:
    tensors = make(torch.float32, device, (200_001,) * 3 + (3,) * 200 + (65_536, 65_537))
    expected = sum(float(t.double().square().sum()) for t in tensors)
    first, second = ops.sum_of_squares(tensors), ops.sum_of_squares(tensors)
    assert float(first) == pytest.approx(expected, rel=1e-6)
    assert torch.equal(first, second)


def test_sum_of_squares_of_nothing_is_zero() -> None:
    result = ops.sum_of_squares([])
    assert result.dtype == torch.float64 and float(result) == 0.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_multiplies_in_place(dtype: torch.dtype, device: str) -> None:
    tensors = make(dtype, device)
    expected = [t.clone().mul_(0.37) for t in tensors]
    versions = [t._version for t in tensors]
    assert ops.scale_(tensors, torch.tensor(0.37, dtype=torch.float64, device=device)) is None
    for got, want in zip(tensors, expected, strict=True):
        torch.testing.assert_close(got, want)
    assert all(t._version > v for t, v in zip(tensors, versions, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_scale_takes_dense_views_and_a_cpu_factor(device: str) -> None:
    tensor = torch.ones(6, 4, device=device)
    ops.scale_([tensor.t()], torch.tensor(3.0))
    assert torch.equal(tensor.cpu(), torch.full((6, 4), 3.0))


def test_scale_of_nothing_does_nothing() -> None:
    assert ops.scale_([], torch.tensor(2.0)) is None


def test_scale_refuses_views_with_gaps_and_leaves_all_tensors_alone() -> None:
    first, second = torch.ones(4), torch.ones(4, 4)
    with pytest.raises(ValueError, match=r"smp::scale_: tensor 1 .* pass a contiguous tensor"):
        ops.scale_([first, second[:, 0]], torch.tensor(2.0))
    assert torch.equal(first, torch.ones(4))


@pytest.mark.parametrize("factor", [torch.ones(2), torch.tensor(2)])
def test_scale_refuses_what_is_no_factor(factor: Tensor) -> None:
    with pytest.raises(ValueError, match="factor must be one floating point number"):
        ops.scale_([torch.ones(4)], factor)


@pytest.mark.parametrize("tensor", [torch.ones(2, dtype=torch.int64), torch.ones(2) * 1j])
def test_other_dtypes_are_errors(tensor: Tensor) -> None:
    with pytest.raises(ValueError, match="must be float32, float64, float16 or bfloat16"):
        ops.sum_of_squares([tensor])
    with pytest.raises(ValueError, match="must be float32, float64, float16 or bfloat16"):
        ops.scale_([tensor], torch.tensor(2.0))


def test_sparse_and_mixed_devices_are_errors() -> None:
    with pytest.raises(ValueError, match="dense"):
        ops.sum_of_squares([torch.eye(3).to_sparse()])
    with pytest.raises(ValueError, match="on one device"):
        ops.sum_of_squares([torch.ones(2), torch.ones(2, device="meta")])


def test_meta_tensors_give_meta_results() -> None:
    tensors = [torch.ones(3, 4, device="meta")]
    result = ops.sum_of_squares(tensors)
    assert result.device.type == "meta" and result.dtype == torch.float64 and result.shape == ()
    assert ops.scale_(tensors, torch.tensor(2.0, device="meta")) is None


def test_schemas_and_fake_tensors_agree_with_the_kernels() -> None:
    tensors = make(torch.float32, "cpu")
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.sum_of_squares.default, (tensors,), test_utils=checks)
    torch.library.opcheck(
        ops.scale_.default, (tensors, torch.tensor(0.5)), test_utils=("test_schema",)
    )


@pytest.mark.parametrize("device", DEVICES)
def test_scale_by_one_leaves_all_bits_alone(device: str) -> None:
    tensors = [torch.randn(70_000).to(device, dtype) for dtype in DTYPES]
    tensors[0][3] = math.nan
    before = [t.clone() for t in tensors]
    ops.scale_(tensors, torch.ones((), device=device))
    for got, want in zip(tensors, before, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
def test_clip_divisor_is_that_of_torch(device: str) -> None:
    for norm in (0.0, 0.5, 0.9999999, 1.0, 4.0):
        for max_norm in (1.0, 0.0):
            parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
            parameter.grad = torch.full((1,), norm, dtype=torch.float64)
            torch.nn.utils.clip_grad_norm_([parameter], max_norm)
            squares = torch.tensor(norm**2, dtype=torch.float64, device=device)
            divisor, own_norm, found_inf = ops.clip_divisor(squares, max_norm)
            assert norm / float(divisor) == pytest.approx(float(parameter.grad), rel=1e-12)
            assert float(own_norm) == pytest.approx(norm) and not found_inf
    divisor, own_norm, found_inf = ops.clip_divisor(squares * math.nan, 1.0)
    assert math.isnan(divisor) and math.isnan(own_norm) and found_inf == 1.0


def test_negative_clip_limit_is_an_error() -> None:
    for limit in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm must be >= 0"):
            ops.clip_divisor(torch.ones((), dtype=torch.float64), limit)


@pytest.mark.parametrize("device", DEVICES)
def test_the_loss_scale_follows_its_rule_on_the_device(device: str) -> None:
    history = ".xx...x..x.xx....."
    arguments: dict[str, Any] = {"init_scale": 64.0, "scale_window": 2, "delayed_shift": 2}
    scaler = DynamicLossScaler(**arguments, device=device)
    scales = []
    for letter in history:
        found = torch.full((), float(letter == "x"), dtype=torch.float64, device=device)
        scaler.update_scale(found)
        scales.append(scaler.factor.clone())  # the number itself is written to
    expected = scale_trace([letter == "x" for letter in history], **arguments)
    assert [float(scale) for scale in scales] == expected
    assert scaler.factor.device.type == device and scaler.loss_scale == expected[-1]
    assert scaler.iteration == len(history) and scaler.last_overflow == history.rindex("x")


def test_schema_of_the_loss_scale_agrees_with_the_kernel() -> None:
    state = torch.tensor([8.0, 0.0, -1.0, 1.0], dtype=torch.float64)
    torch.library.opcheck(
        ops.update_loss_scale_.default,
        (state, torch.zeros(()), 2.0, 1000, 1.0, 1, False),
        test_utils=("test_schema", "test_faketensor"),
    )
    with pytest.raises(ValueError, match="smp::update_loss_scale_: state must be .* 4 elements"):
        ops.update_loss_scale_(state[:3], torch.zeros(()), 2.0, 1000, 1.0, 1, False)
    with pytest.raises(ValueError, match="found_inf must be one floating point number"):
        ops.update_loss_scale_(state, torch.zeros(2), 2.0, 1000, 1.0, 1, False)
