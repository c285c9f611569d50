"""Checks which heads of one matrix of queries, keys and values each rank has."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from smp.replacement.plan_fused import Form, Sizes, form_of, forms_of, likely_heads
from smp.replacement.plan_sizes import CannotCut, Heads


def sizes_of(heads: Heads, size: int, num_ranks: int) -> Sizes:
    out = (heads.queries + 2 * heads.keys) * size
    return Sizes("qkv", out, {"proj": heads.queries * size}, num_ranks)


def labels_of(heads: Heads, by_head: bool) -> list[tuple[str, int]]:
    """The heads of the whole matrix, in its order."""
    keys = range(heads.keys)
    if not by_head:
        queries = [("q", head) for head in range(heads.queries)]
        return [*queries, *(("k", key) for key in keys), *(("v", key) for key in keys)]
    per_key = heads.queries // heads.keys
    found = []
    for key in keys:
        found += [("q", key * per_key + idx) for idx in range(per_key)]
        found += [("k", key), ("v", key)]
    return found


def heads_on(form: Form, rank: int) -> list[tuple[int, int, int]]:
    """Query, key and value of each head as code finds them on a rank, by that rank's numbers."""
    labels = labels_of(form.heads, form.by_head)
    own = [labels[unit] for unit in form.units[rank]]
    num, keys, each = (x[rank] for x in (form.shares.queries, form.shares.keys, form.shares.groups))
    if form.by_head:
        groups = [own[idx * (each + 2) : (idx + 1) * (each + 2)] for idx in range(keys)]
        found = [(q, group[each], group[each + 1]) for group in groups for q in group[:each]]
    else:
        queries, k, v = own[:num], own[num : num + keys], own[num + keys :]
        found = [(query, k[idx // each], v[idx // each]) for idx, query in enumerate(queries)]
    assert all((q[0], k[0], v[0]) == ("q", "k", "v") for q, k, v in found)
    return [(q[1], k[1], v[1]) for q, k, v in found]


@given(
    keys=st.integers(1, 6), per_key=st.integers(1, 4), size=st.integers(1, 3),
    num_ranks=st.integers(1, 6), by_head=st.booleans(),
)  # fmt: skip
def test_each_rank_has_its_queries_with_their_keys_and_values(
    keys: int, per_key: int, size: int, num_ranks: int, by_head: bool
) -> None:
    heads = Heads(keys * per_key, keys)
    sizes = sizes_of(heads, size, num_ranks)
    assert sizes.key_width == keys * size and sizes.heads(heads.queries) == heads
    if heads.queries < num_ranks:
        with pytest.raises(CannotCut, match="ranks cannot share"):
            form_of(sizes, heads, by_head, {})
        return
    form = form_of(sizes, heads, by_head, {})
    found = [head for rank in range(num_ranks) for head in heads_on(form, rank)]
    assert found == [(q, q // per_key, q // per_key) for q in range(heads.queries)]


@given(
    keys=st.integers(1, 6), per_key=st.integers(1, 4), num_ranks=st.integers(1, 6),
    by_head=st.booleans(),
)  # fmt: skip
def test_a_slice_is_held_where_it_has_a_ranks_heads(
    keys: int, per_key: int, num_ranks: int, by_head: bool
) -> None:
    heads = Heads(keys * per_key, keys)
    assume(heads.queries >= num_ranks)
    form = form_of(sizes_of(heads, 2, num_ranks), heads, by_head, {})
    share = form.shares.columns["qkv"]
    total = heads.queries + 2 * heads.keys
    if not share.sizes:
        assert share.heads == form.units and share.unit == 2
        assert keys < num_ranks or (not by_head and per_key > 1)
        return
    matrices = [range(n * total // form.num_packed, (n + 1) * total // form.num_packed)
                for n in range(form.num_packed)]  # fmt: skip
    begin = 0
    for own, num in zip(form.units, share.sizes, strict=True):
        num //= 2
        assert list(own) == [unit for one in matrices for unit in one[begin : begin + num]]
        begin += num


def test_sizes_of_other_matrices_do_not_fit() -> None:
    for out, width in ((12, 12), (13, 12), (44, 12), (24, 16)):
        assert Sizes("up", out, {"down": width}, 2).key_width in (0, 4)
        assert Sizes("up", out, {"down": width}, 2).heads(12) is None
    assert Sizes("qkv", 36, {"proj": 12, "other": 16}, 2).key_width == 0


def test_attributes_with_known_names_are_counted_and_others_guessed() -> None:
    sizes = sizes_of(Heads(8, 2), 4, 2)
    numbers = {"num_heads": 8, "num_key_value_heads": 2, "my_keys": 2, "my_width": 32, "rest": 7}
    [form] = forms_of(sizes, [8], [True], numbers, numbers, 0)
    assert form.attributes == {"num_heads": (4, 4), "num_key_value_heads": (1, 1)}
    guessed = [
        {name: own for name, own in form.attributes.items() if name.startswith("my")}
        for form in forms_of(sizes, [8], [True], numbers, numbers, 1)
    ]
    assert guessed == [{"my_keys": (1, 1)}, {"my_width": (16, 16)}]
    [both] = forms_of(sizes, [8], [True], numbers, numbers, 2)
    assert both.attributes["my_keys"] == (1, 1) and both.attributes["my_width"] == (16, 16)


def test_orders_that_are_the_same_are_one_form() -> None:
    sizes = sizes_of(Heads(4, 1), 2, 2)
    assert len(forms_of(sizes, [4], [True, False], {}, {}, 0)) == 1
    assert (
        form_of(sizes, Heads(4, 1), True, {}).units == form_of(sizes, Heads(4, 1), False, {}).units
    )


def test_numbers_and_sizes_of_heads_are_likely() -> None:
    sizes = sizes_of(Heads(8, 2), 4, 2)
    assert likely_heads(sizes, {"a": 4}) == [8, 4]
    assert likely_heads(sizes, {"a": 2, "b": 8, "c": 4, "d": 5}) == [4, 8, 16]
    assert likely_heads(sizes, {"d": 5}) == []
