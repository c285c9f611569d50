"""Files of a model are cut by size, and written by ranks that own most of them."""

from __future__ import annotations

import json

from smp.checkpoint import shards

SIZES = {"a": 4, "b": 4, "c": 9, "d": 2, "e": 2}


def test_a_shard_has_as_many_tensors_as_fit() -> None:
    assert shards.cut(SIZES, 8) == [["a", "b"], ["c"], ["d", "e"]]
    assert shards.cut(SIZES, 100) == [["a", "b", "c", "d", "e"]]


def test_names_and_index_are_those_of_transformers() -> None:
    assert shards.file_names(1) == ["model.safetensors"]
    assert shards.file_names(2)[1] == "model-00002-of-00002.safetensors"
    index = json.loads(shards.index_of([["b"], ["a"]], {"a": 4, "b": 5}))
    assert index == {
        "metadata": {"total_size": 9},
        "weight_map": {
            "a": "model-00002-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
        },
    }


def test_the_writer_owns_most_and_has_least_to_write() -> None:
    cut = [["a", "b"], ["c"], ["d", "e"]]
    # Ranks 0 and 2 are replicas, as are 1 and 3, which have no part of the first tensors.
    first, second = (lambda size: {0: size, 2: size}), (lambda size: {1: size, 3: size})
    owned = {"a": first(4), "b": first(4), "c": first(9), "d": second(2), "e": first(1)}
    assert shards.choose_writers(cut, SIZES, owned) == [0, 2, 1]
    assert shards.choose_writers([["x"]], {"x": 0}, {"x": {}}) == [0]


def test_writers_take_turns_by_bytes() -> None:
    cut = [["a", "b"], ["c"], ["d", "e"]]
    order = shards.interleaved(cut, [0, 1, 0], SIZES)
    assert list(order) == ["a", "c", "b", "d", "e"]
    assert order == {"a": 0, "b": 0, "c": 1, "d": 0, "e": 0}
