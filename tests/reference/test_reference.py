"""The yardstick itself: comparisons notice errors, references are not vacuous."""

from __future__ import annotations

import pytest
import torch

from tests.reference.data import make_batch
from tests.reference.models import HF_MODELS, OWN_MODELS, build
from tests.reference.single_process import train_reference
from tests.reference.tolerances import assert_close, largest, relative_difference


def test_an_error_above_the_tolerance_is_noticed() -> None:
    ref = {"a": torch.tensor([1.0, 2.0], dtype=torch.float64), "b": None}
    assert_close({"a": ref["a"] * (1 + 1e-11), "b": None}, ref, torch.float64, "x")
    with pytest.raises(AssertionError, match="a 1.00e-09"):
        assert_close({"a": ref["a"] * (1 + 1e-9), "b": None}, ref, torch.float64, "x")
    with pytest.raises(AssertionError, match="names differ"):
        assert_close({"a": ref["a"]}, ref, torch.float64, "x")
    with pytest.raises(AssertionError, match="a tensor here, None in the reference"):
        assert_close({"a": ref["a"], "b": torch.zeros(1)}, ref, torch.float64, "x")


def test_nan_shape_and_dtype_are_differences() -> None:
    ref = torch.ones(2)
    for wrong in (torch.tensor([1.0, float("nan")]), torch.ones(3), torch.ones(2).double()):
        assert relative_difference(wrong, ref) == float("inf")


def test_the_floor_is_a_thousandth_of_the_largest() -> None:
    ref = {"big": torch.tensor([10.0]), "tiny": torch.tensor([1e-12])}
    assert_close({"big": ref["big"], "tiny": torch.tensor([9e-8])}, ref, torch.float32, "x")
    with pytest.raises(AssertionError, match="tiny"):
        assert_close({"big": ref["big"], "tiny": torch.tensor([2e-7])}, ref, torch.float32, "x")


@pytest.mark.parametrize("case", [*OWN_MODELS, *HF_MODELS])
def test_reference_gradients_are_alive(case: str) -> None:
    record = train_reference(case, torch.float64, 2, 4)
    assert largest(record.grads[0]) > 1e-2
    silent = {"branches": "never.", "unused": ("lonely", "several.", "frozen.")}.get(case, ())
    for name, grad in record.grads[0].items():
        if case == "bert" and name.endswith("key.bias"):
            continue  # softmax does not feel a constant
        dead = grad is None or not grad.any()
        assert not dead or name.startswith(silent), f"{name} has no gradient"
    before = build(case, torch.float64).state_dict()
    assert any(not torch.equal(before[name], p) for name, p in record.params.items())


@pytest.mark.parametrize("case", [*OWN_MODELS, *HF_MODELS])
def test_no_parameter_keeps_a_telling_default(case: str) -> None:
    for name, parameter in build(case, torch.float64).named_parameters():
        assert not (parameter == 0).any() and not (parameter == 1).any(), name


@pytest.mark.parametrize("case", ["gptj", "bert"])
def test_replicas_and_steps_have_different_data_with_padding(case: str) -> None:
    batches = [make_batch(case, torch.float64, r, s)["input_ids"] for r in (0, 1) for s in (0, 1)]
    assert len({tuple(ids.flatten().tolist()) for ids in batches}) == 4
    batch = make_batch(case, torch.float64, 0, 0)
    assert (batch["attention_mask"] == 0).any()
    if case == "gptj":
        padded = batch["labels"][batch["attention_mask"] == 0]
        kept = batch["labels"][:, 1:] != -100
        assert (padded == -100).all() and kept.any(1).all()
