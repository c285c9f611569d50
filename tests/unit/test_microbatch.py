"""Cutting arguments into microbatches and joining results, as pure functions."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from smp.step.microbatch import (
    StepOutput,
    batch_sizes,
    join,
    num_microbatches,
    several_sizes,
    split,
    uncut,
    weights,
)


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


@given(st.integers(0, 9), st.integers(1, 8))
def test_batches_make_no_more_pieces_than_samples(batch: int, wanted: int) -> None:
    count = num_microbatches({"x": torch.zeros(batch, 2)}, {}, wanted)
    assert count == max(1, min(batch, wanted))


def test_a_missing_batch_dimension_names_argument_and_shape() -> None:
    with pytest.raises(ValueError, match=r"'x'.*\(6,\).*dimension 1.*input_split_axes"):
        num_microbatches({"x": torch.zeros(6)}, {"x": 1}, 2)


@given(st.integers(1, 40), st.integers(1, 8))
def test_weighted_mean_of_means_is_the_mean_over_the_batch(batch: int, wanted: int) -> None:
    x = torch.randn(batch, dtype=torch.float64)
    arguments = {"x": x, "nested": {"y": x[:, None]}}
    count = num_microbatches(arguments, {}, wanted)
    shares = weights(batch_sizes(arguments, {}), count, strict=True)
    assert (shares is None) == (batch % count == 0), "even batches keep their bits"
    output = StepOutput([piece.mean() for piece in split(x, count, 0)], shares)
    assert torch.allclose(output.reduce_mean(), x.mean(), rtol=1e-12)
    assert torch.equal(output.detach().reduce_mean(), output.reduce_mean())


def test_sizes_count_of_arguments_of_which_the_script_says_nothing() -> None:
    sizes = [("x", 8), ("table", 4), ("x", 8), ("images", 16)]
    assert several_sizes(sizes, {}) == [("x", 8), ("table", 4), ("images", 16)]
    assert several_sizes(sizes, {"images": 0}) == [("x", 8), ("table", 4)]
    assert several_sizes(sizes, {"images": 0, "table": 1}) == []
    assert several_sizes([], {}) == []


class Encoding(UserDict[str, Any]):
    """Like BatchEncoding of transformers."""

    def __init__(self, data: dict[str, Any], lengths: list[int]) -> None:
        super().__init__(data)
        self.lengths = lengths


class Kept:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_what_is_not_cut_and_may_have_samples() -> None:
    arguments = {
        "x": torch.zeros(8, 2),
        "texts": ["a"] * 8,
        "array": np.zeros((8, 3)),
        "batch": {"x": torch.zeros(8), "names": ("b",) * 8},
        "kept": Kept(torch.zeros(8)),
        "mixed": [torch.zeros(8), ["a"] * 8],
    }
    assert uncut(arguments, 8) == ["texts", "array", "batch", "kept", "mixed"]
    others = {
        "texts": ["a"] * 7,
        "array": np.zeros((7, 8)),
        "text": "abcdefgh",
        "number": np.float64(8.0),
        "kept": Kept(torch.zeros(7, 8)),
        "scalar": Kept(torch.tensor(8.0)),
        "model": nn.Linear(8, 8),
        "nothing": None,
        "pair": [torch.zeros(8), torch.zeros(8)],
    }
    assert uncut(others, 8) == []
    assert uncut({"kept": Kept(torch.zeros(3))}, 0) == ["kept"]


def test_mappings_like_those_of_tokenizers_are_cut() -> None:
    batch = Encoding({"ids": torch.arange(4), "inner": {"y": torch.arange(4)}}, [3])
    first, second = split(batch, 2, 0)
    assert type(first) is Encoding and first.lengths == [3] and first["ids"].tolist() == [0, 1]
    assert second["inner"]["y"].tolist() == [2, 3] and batch["ids"].tolist() == [0, 1, 2, 3]


def test_packed_sequences_are_refused() -> None:
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])
    with pytest.raises(ValueError, match="'x' .* is a PackedSequence.*pack inside"):
        batch_sizes({"x": packed}, {})


def test_uneven_batches_of_several_sizes_have_no_weights() -> None:
    sizes = [("x", 6), ("y", 7)]
    assert weights(sizes, 4, strict=False) is None
    with pytest.raises(ValueError, match=r"'x': 6, 'y': 7.*4 microbatches.*non_split_inputs"):
        weights(sizes, 4, strict=True)
    assert weights([("x", 8), ("y", 4)], 4, strict=True) is None


def test_joined_tensors_at_every_depth_are_weighted() -> None:
    results = [
        {"loss": torch.tensor(1.0), "n": [torch.tensor(3.0)]},
        {"loss": torch.tensor(4.0), "n": [torch.tensor(6.0)]},
    ]
    joined = join(results, True, [4 / 3, 2 / 3])
    assert joined["loss"].reduce_mean().item() == pytest.approx(2.0)
    assert joined["n"][0].reduce_mean().item() == pytest.approx(4.0)


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
