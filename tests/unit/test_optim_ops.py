"""`torch.ops.smp.sum_of_squares`, `torch.ops.smp.scale_` and the clip coefficient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from smp import _C

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


def test_clip_coefficient_is_that_of_torch() -> None:
    for norm in (0.0, 0.5, 0.9999999, 1.0, 4.0):
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        parameter.grad = torch.full((1,), norm, dtype=torch.float64)
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        assert norm * _C.clip_coefficient(norm, 1.0) == pytest.approx(float(parameter.grad))
    assert math.isnan(_C.clip_coefficient(math.nan, 1.0))


def test_negative_clip_limit_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_norm must be >= 0"):
        _C.clip_coefficient(1.0, -1.0)
