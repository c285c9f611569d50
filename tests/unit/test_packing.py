"""Arguments of remote calls survive the way to another rank."""

from __future__ import annotations

import contextvars
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from smp.pipeline import caches
from smp.pipeline.packing import Codec

CPU = torch.device("cpu")
MODEL = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
CODEC = Codec(list(MODEL.modules()), CPU)


@dataclass
class Box:
    tensor: Tensor
    name: str
    more: Any = None


def round_trip(value: Any, arguments: list[Tensor] | None = None) -> Any:
    data, tensors = CODEC.pack_result(value, arguments or [])
    return CODEC.unpack(data, tensors, arguments or [])


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=10,
)


@given(NESTED)
def test_plain_structures_come_back_equal(value: Any) -> None:
    assert round_trip(value) == value


def test_tensors_are_taken_out_in_order_and_each_once() -> None:
    q, k = torch.randn(2), torch.randn(3)
    _, tensors = CODEC.pack_result({"a": (q, [k, q]), "b": Box(k, "x")})
    assert [id(t) for t in tensors] == [id(q), id(k)]


def test_objects_with_tensors_come_back_with_the_same_tensors() -> None:
    tensor = torch.randn(3)
    box = round_trip(Box(tensor, "name", OrderedDict(inner=Box(tensor, "deep"))))
    assert box.tensor is tensor and box.more["inner"].tensor is tensor
    assert type(box.more) is OrderedDict and box.more["inner"].name == "deep"


def test_a_result_that_is_an_argument_is_the_callers_own_tensor() -> None:
    argument = torch.randn(2)
    data, tensors = CODEC.pack_result([argument, torch.zeros(1)], [argument])
    assert len(tensors) == 1
    own = torch.randn(2)
    assert CODEC.unpack(data, tensors, [own])[0] is own


def test_modules_of_the_model_travel_as_references() -> None:
    other = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    data, tensors = CODEC.pack_result({"module": MODEL[0]})
    assert tensors == []
    assert Codec(list(other.modules()), CPU).unpack(data, tensors)["module"] is other[0]


def test_a_device_becomes_the_receivers_own() -> None:
    data, tensors = CODEC.pack_result(torch.device("cpu"))
    assert Codec([], torch.device("cpu", 0)).unpack(data, tensors) == torch.device("cpu", 0)


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(ValueError, match="cannot travel"):
        CODEC.pack_result({"f": lambda x: x})


def test_each_rank_has_an_attention_cache_of_its_own_without_contents() -> None:
    transformers = pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)

    def travel() -> None:
        data, tensors, used = CODEC.pack((cache, {"past_key_values": cache}))
        assert not tensors and used == [cache]
        own: dict[int, Any] = {}
        first, second = CODEC.unpack(data, tensors, own_caches=own)
        assert first is second["past_key_values"] and first is not cache
        assert first.get_seq_length() == 0 and cache.get_seq_length() == 2
        again, _ = CODEC.unpack(data, tensors, own_caches=own)
        assert again is first, "one cache per microbatch"
        answer, _ = CODEC.pack_result([first])
        assert CODEC.unpack(answer, [])[0] is first

    contextvars.copy_context().run(travel)


def test_a_cache_that_a_remote_layer_would_have_to_read_is_refused_with_the_remedy() -> None:
    cache = pytest.importorskip("transformers").DynamicCache()
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 1)
    caches.check_unfilled(cache, frozenset({0}), "h.0")
    with pytest.raises(ValueError, match="use_cache=False"):
        caches.check_unfilled(cache, frozenset({1}), "h.1")
