"""The yardstick itself: comparisons notice errors, references are not vacuous."""

from __future__ import annotations

import pytest
import torch

from tests.reference import families
from tests.reference.data import compute_loss, make_batch
from tests.reference.families import CAUSAL, FAMILIES, build_family
from tests.reference.models import HF_MODELS, OWN_MODELS, build
from tests.reference.single_process import train_reference
from tests.reference.tolerances import (
    ROUNDINGS_PER_BLOCK,
    assert_close,
    half_loss_tolerance,
    largest,
    relative_difference,
)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_a_family_gets_a_gradient(family: str) -> None:
    record = train_reference(family, torch.float64, 1, 4)
    assert largest(record.grads[0]) > 1e-2
    for name, grad in record.grads[0].items():
        assert grad is not None and grad.any(), f"{name} has no gradient"
    for name, parameter in build(family, torch.float64).named_parameters():
        assert not (parameter == 0).all() and not (parameter == 1).all(), name


def test_families_keep_the_defaults_of_transformers_apart_from_dropout() -> None:
    for family in (*CAUSAL, "hf/t5"):
        assert build_family(family).config.use_cache is True, family
        assert build_family(f"{family}+nocache").config.use_cache is False, family
    assert build_family("hf/gpt2").config.resid_pdrop == 0.0
    assert build_family("hf/gpt2+dropout").config.resid_pdrop > 0.0
    with pytest.raises(ValueError, match="dorpout"):
        build_family("hf/gpt2+dorpout")


def test_an_expert_of_the_mixture_gets_no_token_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    plain = families.Expert.forward

    def counting(self: families.Expert, tokens: torch.Tensor) -> torch.Tensor:
        seen.append(len(tokens))
        return plain(self, tokens)

    monkeypatch.setattr(families.Expert, "forward", counting)
    model = build("moe", torch.float64)
    for step in range(3):
        batch = make_batch("moe", torch.float64, 0, step)
        for piece in zip(*(t.chunk(8) for t in batch.values()), strict=True):
            compute_loss("moe", model, dict(zip(batch, piece, strict=True)))
    assert 0 in seen and max(seen) > 2


@pytest.mark.parametrize("case", ["gptj", "gpt2"])
def test_lifting_takes_the_float32_out_of_models_of_transformers(case: str) -> None:
    plain, lifted = (train_reference(case, torch.float64, 1, 1, 1, flag) for flag in (False, True))
    floor = 1e-3 * largest(plain.grads[0])
    noise = max(
        relative_difference(grad, plain.grads[0][name], floor)
        for name, grad in lifted.grads[0].items()
        if grad is not None
    )
    # Too much for the tolerance of float64, so a test that passes with both sides lifted shows
    # that both are.
    assert 1e-10 < noise < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_blocks", "num_terms"), [(1, 4), (2, 16), (4, 32)])
def test_roundings_in_series_stay_within_their_bound(
    dtype: torch.dtype, num_blocks: int, num_terms: int
) -> None:
    """200 means of terms that are multiplied as often as a model of so many blocks rounds."""
    generator = torch.Generator().manual_seed(0)
    half = torch.exp2(torch.rand(200, num_terms, generator=generator)).to(dtype)
    exact = half.double()
    for _ in range(num_blocks * ROUNDINGS_PER_BLOCK):
        factor = torch.exp2(torch.rand(exact.shape, generator=generator) - 0.5).to(dtype)
        exact, half = exact * factor.double(), half * factor
    differences = ((half.double() - exact) / exact).mean(1).abs()
    limit = half_loss_tolerance(dtype, 1.0, num_blocks=num_blocks, num_terms=num_terms)
    assert limit / 2 < differences.max().item() <= limit
