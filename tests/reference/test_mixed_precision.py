"""The yardstick of 16-bit training: not vacuous, and its limits tell rounding from mistakes."""

from __future__ import annotations

import pytest
import torch

from tests.dist.split_training import reference_of
from tests.reference.half_precision import HalfRecord
from tests.reference.mixed_precision import CASE, train_mixed
from tests.reference.tolerances import MIXED_TOLERANCE, assert_close, distance

SCALES = {torch.float16: 1024.0, torch.bfloat16: 1.0}


def all_of(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def changes(record: HalfRecord) -> torch.Tensor:
    return all_of(record.masters) - all_of(record.initial)


def worst_gradient(a: HalfRecord, b: HalfRecord, step: int) -> float:
    floor = 0.01 * max(grad.norm().item() for grad in b.grads[step].values())
    return max(distance(a.grads[step][n], grad, floor) for n, grad in b.grads[step].items())


def test_in_float32_it_is_the_plain_loop() -> None:
    mixed = train_mixed(torch.float32, 2, 2, 3)
    plain = reference_of(CASE, torch.float32, 2, 2, 3, False)
    for step in range(3):
        for own, wanted in zip(mixed.losses[step], plain.losses[step], strict=True):
            assert own == pytest.approx(wanted, rel=1e-6)
        assert mixed.norms[step] == pytest.approx(plain.norms[step], rel=1e-5)
        assert_close(mixed.grads[step], plain.grads[step], torch.float32, "gradients")
    assert_close(mixed.masters, plain.params, torch.float32, "parameters")


@pytest.mark.parametrize("dtype", SCALES, ids=str)
def test_limits_are_above_rounding_and_below_mistakes(dtype: torch.dtype) -> None:
    limits = MIXED_TOLERANCE[dtype]
    exact = train_mixed(torch.float32, 2, 2, 3)
    mixed = train_mixed(dtype, 2, 2, 3, SCALES[dtype])
    fewer = train_mixed(dtype, 1, 2, 3, SCALES[dtype])  # a replica is left out
    for step in range(3):
        assert 1e-4 < worst_gradient(mixed, exact, step) < limits.grads
        assert worst_gradient(fewer, mixed, step) > 3 * limits.grads
        assert abs(mixed.norms[step] / exact.norms[step] - 1) < limits.norms
    assert 1e-4 < distance(changes(mixed), changes(exact)) < limits.changes
    assert distance(changes(fewer), changes(mixed)) > 3 * limits.changes
    assert len(set(mixed.masters)) == len(set(mixed.grads[0])) > 20


def test_clipping_and_the_loss_scale_do_what_they_say() -> None:
    plain = train_mixed(torch.float32, 1, 2, 3)
    scaled = train_mixed(torch.float32, 1, 2, 3, 1024.0)
    assert scaled.losses == plain.losses  # a power of two changes nothing
    assert torch.equal(changes(scaled), changes(plain))
    clipped = train_mixed(torch.float32, 1, 2, 3, 1.0, 1.0)
    assert clipped.norms[0] == plain.norms[0] > 1
    assert distance(changes(clipped), changes(plain)) > 0.01
