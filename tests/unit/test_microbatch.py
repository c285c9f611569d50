"""Cutting arguments into microbatches and joining results, as pure functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smp.microbatch import StepOutput, join, num_microbatches, split


class Pair(NamedTuple):
    first: Any
    second: Any


@given(st.integers(1, 24), st.integers(1, 8), st.integers(0, 1))
def test_pieces_join_to_the_whole(batch: int, count: int, axis: int) -> None:
    tensor = torch.randn((batch, 3) if axis == 0 else (3, batch))
    pieces = split(tensor, count, axis)
    assert len(pieces) == count
    assert torch.equal(torch.cat(pieces, dim=axis), tensor)


def test_containers_are_rebuilt_and_other_objects_are_shared() -> None:
    marker, tensor = object(), torch.arange(4)
    first, second = split(Pair({"t": tensor, "o": marker}, [tensor, 3]), 2, 0)
    assert isinstance(first, Pair) and first.first["o"] is marker is second.first["o"]
    assert first.first["t"].tolist() == [0, 1] and second.second[0].tolist() == [2, 3]
    assert second.second[1] == 3


def test_training_batches_must_divide_and_the_error_names_argument_and_shape() -> None:
    with pytest.raises(ValueError, match=r"'x'.*\(6, 2\).*dimension 0 \(6\).*microbatches \(4\)"):
        num_microbatches({"x": torch.zeros(6, 2)}, {}, 4, uneven=False)


@given(st.integers(0, 9), st.integers(1, 8))
def test_forward_only_batches_make_no_more_pieces_than_samples(batch: int, wanted: int) -> None:
    count = num_microbatches({"x": torch.zeros(batch, 2)}, {}, wanted, uneven=True)
    assert count == max(1, min(batch, wanted))


def test_dummies_of_other_ranks_are_cut_by_their_batch() -> None:
    assert [p.shape for p in split(torch.empty(4, 0), 2, 0)] == [(2, 0), (2, 0)]


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
