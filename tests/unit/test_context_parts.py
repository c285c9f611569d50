"""Decisions about parts of sequences: who has which tokens and heads, what an argument is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from smp.context_parallel.parts import (
    Interval,
    activations_in,
    even_parts,
    is_mask,
    mapped,
    share_heads,
    token_dim,
    walk,
)
from smp.context_parallel.trial import is_close

LENGTH = 6


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("extent", [8, 9, 64, 101])
def test_even_parts_cover_all_and_differ_by_one(extent: int, num_ranks: int) -> None:
    sizes = even_parts(extent, num_ranks)
    assert sum(sizes) == extent and len(sizes) == num_ranks
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    x = torch.arange(extent)
    parts = [Interval.of_rank(sizes, rank).of(x, 0) for rank in range(num_ranks)]
    assert torch.equal(torch.cat(parts), x)


@pytest.mark.parametrize(
    ("queries", "keys", "ranks"),
    [(8, 8, 2), (8, 2, 2), (8, 2, 4), (8, 1, 4), (12, 4, 3), (7, 7, 2), (6, 2, 5), (32, 8, 16)],
)
def test_each_rank_has_the_keys_of_its_queries(queries: int, keys: int, ranks: int) -> None:
    heads = share_heads(queries, keys, ranks)
    assert heads is not None
    assert sum(heads.queries) == queries and sum(heads.keys) == keys * heads.repeats
    assert min(heads.queries) >= 1 and min(heads.keys) >= 1
    repeated = [key for key in range(keys) for _ in range(heads.repeats)]
    group = queries // keys
    for rank in range(ranks):
        first, own = sum(heads.queries[:rank]), heads.queries[rank]
        read = repeated[sum(heads.keys[:rank]) : sum(heads.keys[: rank + 1])]
        assert own % len(read) == 0
        for idx in range(own):  # as attention of grouped heads reads them
            assert read[idx // (own // len(read))] == (first + idx) // group


@pytest.mark.parametrize(("queries", "keys", "ranks"), [(2, 2, 4), (6, 4, 2), (1, 1, 2)])
def test_heads_that_cannot_be_shared_are_refused(queries: int, keys: int, ranks: int) -> None:
    assert share_heads(queries, keys, ranks) is None


FLOAT, INT, BOOL = torch.float32, torch.int64, torch.bool
ARGUMENTS = {
    "hidden_states": ("hidden_states", (2, LENGTH, 8), FLOAT, 1),
    "as many features as tokens": ("x", (2, LENGTH, LENGTH), FLOAT, 1),
    "ids": ("ids", (2, LENGTH), INT, 1),
    "positions": ("cache_position", (LENGTH,), INT, 0),
    "as many samples as tokens": ("position_ids", (LENGTH, LENGTH), INT, 1),
    "positions of three axes": ("position_ids", (3, 2, LENGTH), INT, 2),
    "angles": ("cos", (1, LENGTH, 4), FLOAT, 1),
    "table": ("table", (LENGTH, 4), FLOAT, 0),
    "time first": ("x", (LENGTH, 2, 8), FLOAT, 0),
    "angles of heads": ("cos", (2, 4, LENGTH, 8), FLOAT, 2),
    "other length": ("memory", (2, LENGTH + 1, 8), FLOAT, None),
    "mask by name": ("attention_mask", (2, LENGTH), INT, None),
    "mask by type": ("keep", (2, LENGTH), BOOL, None),
    "bias of pairs": ("bias", (2, 4, LENGTH, LENGTH), FLOAT, None),
    "bias of keys": ("bias", (2, 1, 1, LENGTH), FLOAT, None),
    "pairs of numbers": ("buckets", (1, LENGTH, LENGTH), INT, None),
    "number": ("scale", (), FLOAT, None),
}


@pytest.mark.sample(keep=99)
@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_are_cut_along_their_tokens(case: str) -> None:
    name, shape, dtype, dim = ARGUMENTS[case]
    assert token_dim(name, torch.zeros(shape, dtype=dtype), LENGTH) == dim


def test_masks_are_known_by_name_type_and_shape() -> None:
    masks = {name for name, (n, s, d, _) in ARGUMENTS.items() if is_mask(n, _of(s, d), LENGTH)}
    assert masks == {
        *("mask by name", "mask by type", "bias of pairs", "bias of keys", "pairs of numbers")
    }


def _of(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_activations_are_found_by_name_then_by_form() -> None:
    x, ids = torch.zeros(2, 5, 8), torch.zeros(2, 5, 8, dtype=torch.int64)
    assert activations_in({"bias": x, "hidden_states": x}) == "hidden_states"
    assert activations_in({"ids": ids, "more": (3, x)}) == "more[1]"
    assert activations_in({"ids": ids, "mask": torch.zeros(2, 5)}) is None


def test_containers_without_changes_are_the_same_objects() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    value = {"kept": [x, 1], "changed": (y, {"z": x})}
    assert [name for name, _ in walk(value, "")] == ["kept[0]", "changed[0]", "changed[1].z"]
    made = mapped(value, "", lambda name, t: -t if t is y else t)
    assert made["kept"] is value["kept"] and made["changed"][1] is value["changed"][1]
    assert torch.equal(made["changed"][0], -y) and mapped(value, "", lambda name, t: t) is value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_one_token_of_many_that_differs_is_seen(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    whole = torch.randn(2, 512, 16, dtype=dtype)
    part = whole.clone()
    assert is_close(part, whole)
    part[1, 0] *= 0.75
    assert not is_close(part, whole)
    assert is_close(whole * (1 + torch.finfo(dtype).eps), whole)  # rounding
    assert not is_close(part.float(), whole) or dtype == torch.float32
