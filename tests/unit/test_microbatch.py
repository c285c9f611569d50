"""Joining what microbatches return, as pure functions."""

from __future__ import annotations

import pytest
import torch

from smp.step.microbatch import StepOutput, join


def test_joined_tensors_at_every_depth_are_weighted() -> None:
    results = [
        {"loss": torch.tensor(1.0), "n": [torch.tensor(3.0)]},
        {"loss": torch.tensor(4.0), "n": [torch.tensor(6.0)]},
    ]
    joined = join(results, True, [4 / 3, 2 / 3])
    assert joined["loss"].reduce_mean().item() == pytest.approx(2.0)
    assert joined["n"][0].reduce_mean().item() == pytest.approx(4.0)


def test_join_makes_step_outputs_lists_and_keeps_none() -> None:
    results = [
        {"loss": torch.tensor(float(mb)), "n": mb, "none": None, "t": (torch.full((1,), mb), mb)}
        for mb in range(3)
    ]
    joined = join(results, detach=True)
    assert joined["n"] == [0, 1, 2] and joined["none"] is None
    assert joined["loss"].reduce_mean().item() == 1.0 and joined["loss"].reduce_sum().item() == 3.0
    assert joined["t"][0].concat().tolist() == [0, 1, 2] and joined["t"][1] == [0, 1, 2]


def test_model_output_stays_one() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    results = [outputs.CausalLMOutput(loss=torch.ones(()), logits=torch.ones(2, 3))] * 2
    joined = join(results, detach=True)
    assert isinstance(joined, outputs.CausalLMOutput)
    assert joined["logits"].concat().shape == (4, 3) and joined[0] is joined.loss
    assert list(joined) == ["loss", "logits"]


def test_different_structures_are_refused_with_the_microbatch() -> None:
    with pytest.raises(ValueError, match="microbatch 1"):
        join([torch.ones(1), (torch.ones(1),)], detach=True)


def test_a_step_output_is_no_sequence() -> None:
    with pytest.raises(TypeError):
        iter(StepOutput([torch.ones(1)]))
