"""Forms of batches that `smp.step` cuts by samples: pairs, and rows without padding."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smp.integrations.trainer_batches import (
    PAIRS,
    PIECES,
    cuts_of,
    joined_outputs,
    num_samples,
    restored,
    to_cut,
)


def flat(lengths: list[int]) -> dict[str, Any]:
    """Returns what a collator makes of sequences of these lengths."""
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    edges = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    ids = torch.arange(sum(lengths))[None] + 100
    return {
        "input_ids": ids, "labels": ids.clone(), "position_ids": positions,
        "cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": max(lengths),
        "max_length_k": max(lengths), "seq_idx": numbers[None].to(torch.int32),
    }  # fmt: skip


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(other[name]))
        for name, value in one.items()
    )


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 6))
def test_a_row_of_sequences_is_cut_between_them(lengths: list[int], count: int) -> None:
    batch = flat(lengths)
    cut = to_cut(batch, count, has_pairs=False)
    pieces = cut[PIECES]
    assert len(pieces) == min(count, len(lengths))
    assert num_samples(batch) == num_samples(cut) == sum(lengths)
    assert same(restored(cut), batch)
    first = 0
    for piece in pieces:
        own = restored({PIECES: [piece]})
        num = len(own["cu_seq_lens_q"]) - 1
        expected = flat(lengths[first : first + num])
        ids = expected["input_ids"] + sum(lengths[:first])
        assert same(own, expected | {"input_ids": ids, "labels": ids})
        first += num
    assert first == len(lengths)
    tokens = [restored({PIECES: [piece]})["input_ids"] for piece in pieces]
    assert torch.equal(joined_outputs(tokens, cut), batch["input_ids"])


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 6))
def test_pieces_have_about_as_many_tokens(lengths: list[int], count: int) -> None:
    starts = [0, *itertools.accumulate(lengths)][:-1]
    edges = cuts_of(starts, sum(lengths), count)
    sizes = [end - begin for begin, end in itertools.pairwise(edges)]
    assert all(size > 0 for size in sizes) and sum(sizes) == sum(lengths)
    if len(set(lengths)) == 1 and len(lengths) % count == 0:
        assert len(set(sizes)) == 1


def test_microbatches_have_both_sequences_of_a_pair() -> None:
    chosen, rejected = torch.arange(6).reshape(3, 2), torch.arange(10, 16).reshape(3, 2)
    batch = {"input_ids": torch.cat([chosen, rejected]), "ref_chosen_logps": torch.arange(3.0)}
    cut = to_cut(batch, 2, has_pairs=True)
    rows = cut[PAIRS]
    assert rows["input_ids"].shape == (3, 2, 2) and num_samples(cut) == 3
    part = restored({PAIRS: {name: value[1:] for name, value in rows.items()}})
    assert torch.equal(part["input_ids"], torch.cat([chosen[1:], rejected[1:]]))
    assert torch.equal(part["ref_chosen_logps"], torch.tensor([1.0, 2.0]))
    parts = [torch.cat([chosen[:1], rejected[:1]]), part["input_ids"]]
    assert torch.equal(joined_outputs(parts, cut), batch["input_ids"])


def test_rows_stay_as_they_are() -> None:
    batch = {"input_ids": torch.ones(4, 3), "position_ids": torch.arange(3).expand(4, 3)}
    assert same(to_cut(batch, 2, has_pairs=False), batch) and num_samples(batch) == 4
    outputs = [torch.ones(2, 3), torch.zeros(1, 3)]
    assert joined_outputs(outputs, batch).shape == (3, 3)


def test_what_a_row_without_padding_cannot_have_is_named() -> None:
    with pytest.raises(ValueError, match="its 'pixel_values' is \\(3, 8\\)"):
        to_cut(flat([2, 3]) | {"pixel_values": torch.ones(3, 8)}, 2, has_pairs=False)
    batch = flat([2, 3])
    batch["position_ids"] = batch["position_ids"] + 1
    with pytest.raises(ValueError, match="begin with 0 in each sequence"):
        to_cut(batch, 2, has_pairs=False)


def test_images_in_different_numbers_are_named() -> None:
    batch = {"input_ids": torch.tensor([[1, 7, 7], [7, 7, 2]]), "pixel_values": torch.ones(2, 3)}
    assert same(to_cut(batch, 2, has_pairs=False, image_token=7), batch)
    batch["input_ids"][1, 0] = 3
    assert same(to_cut(batch, 1, has_pairs=False, image_token=7), batch)
    with pytest.raises(ValueError, match=r"the samples of the batch have \[2, 1\] image tokens"):
        to_cut(batch, 2, has_pairs=False, image_token=7)
