"""Arguments of a step that have samples, and the way in which they are cut."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from smp.step.cutting import Cutting
from smp.step.microbatch import StepOutput
from smp.step.readings import Reading, Rules

zeros = torch.zeros


class Pair(NamedTuple):
    first: Any
    second: Any


class Encoding(UserDict[str, Any]):
    """Like BatchEncoding of transformers."""

    def __init__(self, data: dict[str, Any], lengths: list[int]) -> None:
        super().__init__(data)
        self.lengths = lengths


class Kept:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def rules(axes: Mapping[str, int] | None = None, *non_split: str) -> Rules:
    return Rules(frozenset(non_split), axes or {})


def cut(own: Rules | None = None, **arguments: Any) -> Cutting:
    return Cutting(arguments, own or rules())


def pieces(count: int, own: Rules | None = None, **arguments: Any) -> list[dict[str, Any]]:
    found = cut(own, **arguments).pieces(count)
    return [{name: values[mb] for name, values in found.items()} for mb in range(count)]


# ---- pieces


@given(st.integers(1, 24), st.integers(1, 8), st.integers(0, 1))
def test_pieces_join_to_the_whole(batch: int, count: int, axis: int) -> None:
    tensor = torch.randn((batch, 3) if axis == 0 else (3, batch))
    parts = cut(rules({"x": axis}), x=tensor).pieces(count)["x"]
    assert len(parts) == count
    if batch > 1:
        assert torch.equal(torch.cat(parts, dim=axis), tensor)


def test_containers_are_rebuilt_and_other_objects_are_shared() -> None:
    marker, tensor = object(), torch.arange(4)
    first, second = pieces(2, pair=Pair({"t": tensor, "o": marker}, [tensor, 3]))
    assert isinstance(first["pair"], Pair)
    assert first["pair"].first["o"] is marker is second["pair"].first["o"]
    assert first["pair"].first["t"].tolist() == [0, 1]
    assert second["pair"].second[0].tolist() == [2, 3] and second["pair"].second[1] == 3


@given(st.integers(0, 9), st.integers(1, 8))
def test_batches_make_no_more_pieces_than_samples(batch: int, wanted: int) -> None:
    assert cut(x=zeros(batch, 2)).count(wanted) == max(1, min(batch, wanted))


def test_a_missing_batch_dimension_names_argument_and_shape() -> None:
    with pytest.raises(ValueError, match=r"'batch.x'.*\(6,\).*dimension 1.*input_split_axes"):
        cut(rules({"batch": 1}), batch={"x": zeros(6)})


@given(st.integers(1, 40), st.integers(1, 8))
def test_weighted_mean_of_means_is_the_mean_over_the_batch(batch: int, wanted: int) -> None:
    x = torch.randn(batch, dtype=torch.float64)
    cutting = cut(x=x, nested={"y": x[:, None]})
    count = cutting.count(wanted)
    samples = cutting.samples_by_microbatch(count)
    assert sum(samples) == batch and max(samples) - min(samples) <= 1
    shares = [own * count / batch for own in samples]
    output = StepOutput([piece.mean() for piece in cutting.pieces(count)["x"]], shares)
    assert torch.allclose(output.reduce_mean(), x.mean(), rtol=1e-12)
    assert torch.equal(output.detach().reduce_mean(), output.reduce_mean())


def test_mappings_like_those_of_tokenizers_are_cut() -> None:
    batch = Encoding({"ids": torch.arange(4), "inner": {"y": torch.arange(4)}}, [3])
    first, second = (piece["batch"] for piece in pieces(2, batch=batch))
    assert type(first) is Encoding and first.lengths == [3] and first["ids"].tolist() == [0, 1]
    assert second["inner"]["y"].tolist() == [2, 3] and batch["ids"].tolist() == [0, 1, 2, 3]


def test_dummies_of_other_ranks_are_cut_by_their_batch() -> None:
    assert [p["x"].shape for p in pieces(2, x=torch.empty(4, 0))] == [(2, 0), (2, 0)]


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed_sequences_are_cut_by_their_batch(enforce_sorted: bool) -> None:
    lengths = [4, 3, 2, 2, 1] if enforce_sorted else [1, 4, 2, 3, 2]
    sequences = [torch.randn(length, 3, requires_grad=True) for length in lengths]
    packed = pack_sequence(sequences, enforce_sorted=enforce_sorted)
    found = pieces(2, x=packed, y=torch.arange(5))
    assert all(isinstance(piece["x"], PackedSequence) for piece in found)
    whole = [sequence for piece in found for sequence in unpack_sequence(piece["x"])]
    assert all(map(torch.equal, whole, sequences)) and [len(p["y"]) for p in found] == [3, 2]
    sum(sequence.sum() for sequence in whole).backward()
    assert all(s.grad is not None and bool((s.grad == 1).all()) for s in sequences)


def test_a_part_of_a_batch_is_read_as_the_batch_is() -> None:
    """Cuts a part of two samples; alone, it would look like a pair, its weights like samples."""
    pair, weights = [torch.arange(8), zeros(8, 2)], zeros(2)
    part = cut(pair=pair, y=zeros(8), texts=list("abcdefgh"), weights=weights).part(4, 1)
    assert part.num_samples == 2 and part.samples_by_microbatch(2) == [1.0, 1.0]
    found = {name: pieces[1] for name, pieces in part.pieces(2).items()}
    assert found["pair"][0].tolist() == [3] and found["pair"][1].shape == (1, 2)
    assert found["texts"] == ["d"] and found["weights"] is weights
    paths = [(path, axis) for path, _, axis in part.along()]
    assert paths == [(("pair", "0"), 0), (("pair", "1"), 0), (("y",), 0)]


def test_several_entries_for_each_sample_stay_with_their_sample() -> None:
    found = pieces(4, rules({"images": 0}), x=torch.arange(6), y=zeros(6), images=torch.arange(12))
    assert [p["images"].tolist() for p in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11]]
    assert [p["x"].tolist() for p in found] == [[0, 1], [2, 3], [4], [5]]


def test_entries_that_lie_in_two_microbatches_are_refused() -> None:
    cutting = cut(rules({"x": 0, "y": 0}), x=zeros(6), z=zeros(6), y=zeros(9))
    with pytest.raises(ValueError, match="'z'|'x'|'y'.* 4 microbatches.*non_split_inputs"):
        cutting.pieces(4)


# ---- what has samples


def test_the_size_of_most_arguments_is_the_batch() -> None:
    cutting = cut(weights=zeros(10), x=zeros(8, 3), y=zeros(8))
    assert cutting.num_samples == 8
    first, second = (piece["weights"] for piece in pieces(2, x=zeros(8), weights=zeros(10)))
    assert first is second, "a vector of class weights is whole"
    [text] = cutting.remarks(4).values()
    assert "8 samples (x, y)" in text and "weights (10,)" in text and "non_split_inputs" in text


def test_one_row_is_for_all_samples() -> None:
    arguments = {"x": zeros(12, 8, 3), "state": zeros(1, 8, 3), "mask": zeros(1, 12, 12)}
    cutting = cut(**arguments, y=zeros(12))
    assert cutting.count(4) == 4 and not cutting.remarks(4)
    for piece in cutting.pieces(4)["state"]:
        assert piece is arguments["state"]
    assert cut(x=zeros(1, 3), y=zeros(1)).count(4) == 1
    named = cut(rules({"x": 1, "mask": 1}), x=zeros(3, 8), mask=zeros(4, 1))
    assert named.num_samples == 8 and named.pieces(2)["mask"][0].shape == (4, 1)


def test_a_list_with_an_entry_for_each_sample_is_cut_as_one() -> None:
    images = [zeros(3, 5, 6 + i) for i in range(8)]
    targets = [{"boxes": zeros(i % 3, 4), "labels": zeros(i % 3)} for i in range(8)]
    for batch in ({"a": images, "b": targets}, {"c": (tuple(images), tuple(targets))}):
        found = pieces(4, **batch)
        values = [v for piece in found for v in ([*piece.values()] if "a" in piece else piece["c"])]
        assert [len(value) for value in values] == [2] * 8
        assert values[2][0] is images[2] and values[3][1] is targets[3]
    pairs = list(zip(images, targets, strict=True))
    assert [p["batch"] for p in pieces(4, batch=pairs)] == [pairs[i : i + 2] for i in (0, 2, 4, 6)]
    assert not cut(batch=pairs).remarks(4)


def test_lists_of_texts_and_arrays_are_cut_beside_tensors() -> None:
    found = pieces(
        2,
        x=zeros(4),
        texts=list("abcd"),
        names=tuple("efgh"),
        arrays=[np.zeros(3)] * 4,
        array=np.arange(4),
        lengths=[1, 2, 3, 4],
        size=(224, 224),
        classes=["cat", "dog"],
    )
    assert found[1]["texts"] == ["c", "d"] and found[1]["names"] == ("g", "h")
    assert found[1]["array"].tolist() == [2, 3] and len(found[1]["arrays"]) == 2
    assert found[0]["lengths"] == [1, 2] and found[0]["size"] == (224, 224)
    assert found[0]["classes"] == ["cat", "dog"]


def test_a_tuple_of_numbers_is_whole_and_told() -> None:
    cutting = cut(x=zeros(2, 3), size=(224, 224))
    assert cutting.pieces(2)["size"][0] == (224, 224)
    assert "whole of size" in cutting.remarks(2)["uncut"]


def test_names_reach_into_containers() -> None:
    own = rules({"inputs.x": 1, "pair.1": 1}, "inputs.table")
    first = pieces(
        2,
        own,
        inputs={"x": zeros(5, 8), "table": zeros(8), "y": zeros(8)},
        pair=(zeros(8), zeros(3, 8)),
    )[0]
    assert first["inputs"]["x"].shape == (5, 4) and first["inputs"]["table"].shape == (8,)
    assert first["pair"][1].shape == (3, 4) and first["inputs"]["y"].shape == (4,)


def test_parameters_and_arguments_that_are_named_whole_do_not_count() -> None:
    cutting = cut(
        rules(None, "a", "b"), a=zeros(3), b=zeros(3), w=nn.Parameter(zeros(8)), x=zeros(8)
    )
    assert cutting.num_samples == 8 and not cutting.remarks(2)
    assert cutting.pieces(2)["w"][0].shape == (8,)


def test_dimensions_of_samples_are_known() -> None:
    assert cut(x=zeros(4, 2)).sample_dim() == 0 == cut(x=4).sample_dim()
    assert cut(rules({"x": -1}), x=zeros(2, 4)).sample_dim() == 1
    assert cut(rules({"x": 1}), x=zeros(2, 4), y=zeros(4)).sample_dim() is None


# ---- what is told


def test_time_major_batches_are_told_with_the_remedy() -> None:
    text = cut(x=zeros(12, 8, 3), y=zeros(8)).remarks(4)["others"]
    assert '{"x": 1}' in text
    own = rules({"x": 1, "state": 1})
    cutting = cut(own, x=zeros(12, 8, 3), state=zeros(1, 8, 3), y=zeros(8))
    assert cutting.num_samples == 8 and not cutting.remarks(4)
    assert [p.shape for p in cutting.pieces(4)["state"]] == [(1, 2, 3)] * 4


@pytest.mark.parametrize("x", [zeros(8, 8, 3), zeros(8, 8)])
def test_squares_are_told_unless_another_batch_was_none(x: Tensor) -> None:
    own = rules()
    assert "x has 8 along dimension 1, too" in cut(own, x=x, y=zeros(8)).remarks(4)["several"]
    assert not cut(own, x=x[:4], y=zeros(4)).remarks(4)
    assert not cut(own, x=x, y=zeros(8)).remarks(4), "the batch before had one reading"
    assert not cut(rules({"x": 0}), x=x, y=zeros(8)).remarks(4)
    assert not cut(x=zeros(4, 4, 8, 8)).remarks(4), "images have channels"


def test_a_pair_of_two_samples_is_a_container_and_told() -> None:
    cutting = cut(batch=(zeros(2, 3), zeros(2)))
    assert [len(p[0]) for p in cutting.pieces(2)["batch"]] == [1, 1]
    assert "batch has 2 entries, too" in cutting.remarks(2)["several"]
    own = rules()
    assert not cut(own, batch=(zeros(8, 3), zeros(8))).remarks(2)
    assert not cut(own, batch=(zeros(2, 3), zeros(2))).remarks(2), "the last batch of an epoch"


def test_three_images_are_three_samples() -> None:
    images, targets = [zeros(3, 5, 6)] * 3, [{"boxes": zeros(3, 4)}] * 3
    cutting = cut(images=images, targets=targets)
    assert [len(p) for p in cutting.pieces(3)["images"]] == [1, 1, 1]
    assert "images has tensors of as many rows, too" in cutting.remarks(3)["several"]
    assert cut(images=images[:1], targets=targets[:1]).num_samples == 1


def test_what_had_another_size_once_is_whole_in_all_batches() -> None:
    own = rules()
    weights, names = zeros(6), list("abcdef")
    assert cut(own, x=zeros(8, 3), y=zeros(8), weights=weights, names=names).remarks(2)
    last = cut(own, x=zeros(6, 3), y=zeros(6), weights=weights, names=names)
    assert last.pieces(2)["weights"][0] is weights and last.pieces(2)["names"][0] is names
    assert not last.remarks(2)


def test_what_is_the_same_tensor_in_the_next_step_is_told() -> None:
    own, weights, x = rules(), zeros(8), zeros(8, 3)
    assert not cut(own, x=x, weights=weights).remarks(2)
    assert not cut(own, x=x, weights=weights).remarks(2), "nothing is new"
    text = cut(own, x=zeros(8, 3), weights=weights).remarks(2)["fixed"]
    assert "cuts weights into" in text and "non_split_inputs" in text
    weights.copy_(torch.ones(8))
    assert not cut(own, x=zeros(8, 3), weights=weights).remarks(2), "a buffer that is filled"


def test_what_is_not_cut_and_may_have_samples() -> None:
    arguments = {"x": zeros(8, 2), "kept": Kept(zeros(8)), "deep": {"kept": Kept(zeros(8))}}
    assert "whole of kept, deep.kept" in cut(**arguments).remarks(4)["uncut"]
    others = {
        "text": "abcdefgh",
        "number": np.float64(8.0),
        "kept": Kept(zeros(7, 8)),
        "scalar": Kept(torch.tensor(8.0)),
        "model": nn.Linear(8, 8),
        "nothing": None,
        "array": np.zeros((7, 8)),
    }
    assert not cut(x=zeros(8, 2), **others).remarks(4)
    assert "kept" in cut(kept=Kept(zeros(3))).remarks(2)["uncut"]


def test_readings_are_kept_by_path() -> None:
    own = rules()
    cut(own, batch={"x": zeros(8, 3), "w": zeros(5)}, images=[zeros(3, 4, 4)] * 8)
    assert own.known[("batch", "w")] is Reading.WHOLE
    assert own.known[("images",)] is Reading.ENTRIES
