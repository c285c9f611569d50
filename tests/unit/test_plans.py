"""Plans: which parts they name, which columns feed which rows, how these are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp.replacement import plans
from smp.replacement.plan_sizes import CannotCut, Heads, heads_of, shares_of

LLAMA = {
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}


def paths_of(num_layers: int) -> list[str]:
    return [key.replace("*", str(idx)) for idx in range(num_layers) for key in LLAMA]


# ---- words


def test_an_unknown_word_is_refused_with_the_list() -> None:
    with pytest.raises(plans.UnknownWord, match="'a.b'.*did you mean 'colwise'.*rowwise") as error:
        plans.check_plan({"a.b": "colwisee"})
    assert all(word in str(error.value) for word in plans.WORDS)


def test_what_is_no_dict_of_strings_is_refused() -> None:
    for wrong in (["colwise"], {"a": 1}, {1: "colwise"}, None):
        with pytest.raises(ValueError, match="a dict of paths and words"):
            plans.check_plan(wrong)


def test_older_words_are_those_of_today() -> None:
    checked = plans.check_plan({"head": "colwise_rep", "down": "rowwise_rep"})
    assert checked == {"head": "colwise_gather_output", "down": "rowwise_split_input"}


# ---- matching


def test_a_star_is_one_component() -> None:
    found = plans.match({"layers.*.up": "colwise"}, ["layers.0.up", "layers.0.a.up", "layers.up"])
    assert found.words == {"layers.0.up": "colwise"} and not found.unused


def test_the_key_with_fewer_stars_counts_whatever_the_order() -> None:
    plan = {"layers.3.up": "replicate", "layers.*.up": "colwise"}
    for given_plan in (plan, dict(reversed(plan.items()))):
        found = plans.match(given_plan, ["layers.2.up", "layers.3.up"])
        assert found.words == {"layers.2.up": "colwise", "layers.3.up": "replicate"}


def test_keys_that_name_nothing_are_told() -> None:
    assert plans.match({"a": "colwise", "b.*": "rowwise"}, ["a", "b"]).unused == ("b.*",)


# ---- groups


def test_columns_belong_to_the_row_in_the_smallest_module_around() -> None:
    found = plans.group(plans.match(LLAMA, paths_of(2)).words)
    assert not found.alone
    assert set(found.groups) == {
        f"layers.{i}.{part}" for i in (0, 1) for part in ("self_attn", "mlp")
    }
    assert len(found.groups["layers.1.self_attn"].columns) == 3
    assert found.groups["layers.1.mlp"].rows == ["layers.1.mlp.down_proj"]


def test_a_row_without_columns_of_its_own_takes_none_of_a_smaller_group() -> None:
    words = {"0.mlp.up": "colwise", "0.mlp.down": "rowwise", "0.attn.o": "rowwise"}
    found = plans.group(words)
    assert set(found.groups) == {"0.mlp"} and found.alone == ("0.attn.o",)


def test_a_row_with_a_gate_beside_it_is_fed_from_outside_too() -> None:
    words = {"0.attn.q": "colwise", "0.attn.out.gate": "colwise", "0.attn.out.o": "rowwise"}
    found = plans.group(words)
    assert found.groups["0.attn"].columns == ["0.attn.q", "0.attn.out.gate"] and not found.alone
    two = {**words, "0.up": "colwise", "0.down": "rowwise", "0.extra.a": "colwise"}
    assert plans.group(two).groups.keys() == {"0.attn", "0"}


def test_columns_without_a_row_are_told() -> None:
    assert plans.group({"a.up": "colwise"}).alone == ("a.up",)


def test_groups_inside_of_each_other_share_the_outer_border() -> None:
    words = {
        "0.attn.q": "colwise", "0.attn.o": "rowwise", "0.fc1": "colwise", "0.fc2": "rowwise",
    }  # fmt: skip
    found = plans.group(words)
    assert plans.outermost(found.groups) == {"0": "0", "0.attn": "0"}
    assert found.groups["0"].columns == ["0.fc1"]


COMPONENT = st.sampled_from(["a", "b", "0", "1"])
PATH = st.lists(COMPONENT, min_size=1, max_size=4).map(".".join)


@given(st.dictionaries(PATH, st.sampled_from(["colwise", "rowwise"]), max_size=12))
def test_each_column_and_row_is_in_one_group_or_alone(words: dict[str, str]) -> None:
    found = plans.group(words)
    members = [p for g in found.groups.values() for p in (*g.columns, *g.rows)]
    assert sorted([*members, *found.alone]) == sorted(words)
    for path, group in found.groups.items():
        assert group.rows and all(
            not path or part.startswith(f"{path}.") for part in (*group.columns, *group.rows)
        )


# ---- sizes


def test_features_are_cut_evenly_larger_parts_first() -> None:
    shares = shares_of({"up": 10}, {"down": 10}, None, 4)
    assert shares.columns["up"].sizes == shares.rows["down"].sizes == (3, 3, 2, 2)


def test_columns_of_another_width_are_refused() -> None:
    with pytest.raises(CannotCut, match="20 features in 'up'"):
        shares_of({"up": 20}, {"down": 10}, None, 2)


def test_heads_are_found_in_numbers_and_sizes() -> None:
    sizes = {"q_proj": 32, "k_proj": 8, "v_proj": 8}
    for numbers in (
        {"num_heads": 8, "num_key_value_groups": 4},
        {"head_dim": 4, "num_key_value_groups": 4},
        {"head_dim": 4},
        {"head_size": 4},
        {"num_attention_heads": 8, "num_key_value_heads": 2},
    ):
        assert heads_of(numbers, sizes, 32) == Heads(8, 2), numbers
    assert heads_of({}, {"up": 44}, 44) is None


@given(
    keys=st.integers(1, 9), per_key=st.integers(1, 5), size=st.integers(1, 4),
    num_ranks=st.integers(1, 6),
)  # fmt: skip
def test_each_rank_has_the_keys_of_its_queries(
    keys: int, per_key: int, size: int, num_ranks: int
) -> None:
    queries = keys * per_key
    columns = {"q": queries * size, "k": keys * size, "v": keys * size}
    heads = Heads(queries, keys)
    if queries < num_ranks:
        with pytest.raises(CannotCut, match="heads"):
            shares_of(columns, {"o": queries * size}, heads, num_ranks)
        return
    shares = shares_of(columns, {"o": queries * size}, heads, num_ranks)
    assert sum(shares.columns["q"].sizes) == queries * size
    assert shares.columns["q"].sizes == shares.rows["o"].sizes
    begin = begin_key = 0
    for rank in range(num_ranks):
        own_keys = shares.columns["k"].heads[rank] if shares.columns["k"].heads else tuple(
            range(begin_key, begin_key + shares.columns["k"].sizes[rank] // size)
        )  # fmt: skip
        # As code with shared keys does: each key for so many queries, one after the other.
        used = [key for key in own_keys for _ in range(shares.groups[rank])]
        own = range(begin, begin + shares.queries[rank])
        assert used == [query // per_key for query in own]
        begin, begin_key = own.stop, begin_key + len(own_keys)
