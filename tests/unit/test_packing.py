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
    with pytest.raises(ValueError, match="cannot be sent"):
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


def test_a_cache_that_a_remote_layer_would_have_to_read_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = pytest.importorskip("transformers").DynamicCache()
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 1)
    caches.check_unfilled(cache, frozenset({0}), "h.0")
    monkeypatch.setattr(caches._C, "rank_prefix", lambda: "[rank] ")
    with pytest.raises(ValueError, match=r"^\[rank\] .*use_cache=False"):
        caches.check_unfilled(cache, frozenset({1}), "h.1")


def test_an_emptied_cache_is_as_it_was_made_whatever_its_layers_carry() -> None:
    cache_utils = pytest.importorskip("transformers.cache_utils")
    if not hasattr(cache_utils, "LinearAttentionAndFullAttentionLayer"):
        pytest.skip("an older transformers")

    class Own(cache_utils.DynamicLayer):  # type: ignore[misc,name-defined]
        def __init__(self, width: int, **kwargs: Any) -> None:
            super().__init__()
            self.width = width
            self.sums: dict[str, Any] = {"first": None}
            self.seen = 0

    class OfModel(cache_utils.DynamicLayer):  # type: ignore[misc,name-defined]
        def __init__(self, config: Any, **kwargs: Any) -> None:
            super().__init__()
            self.rate = config.rate

    class Config:
        rate = 3

    kinds: list[Any] = [
        cache_utils.LinearAttentionAndFullAttentionLayer(number_of_states=2),
        cache_utils.DynamicSlidingWindowLayer(sliding_window=2),
        cache_utils.StaticLayer(max_cache_len=4),
        Own(width=5),
        OfModel(Config()),
    ]
    cache = cache_utils.Cache(layers=kinds)
    before = CODEC.pack_result([vars(layer) for layer in caches.emptied(cache, Config()).layers])
    states = torch.ones(1, 1, 2, 4, requires_grad=True) * 2
    for idx in range(len(kinds)):
        cache.update(states, states, idx)
    cache.update_conv_state(states[0], 0)
    cache.update_recurrent_state(states[0], 0, state_idx=1)
    kinds[3].sums["first"], kinds[3].seen = states, 7
    empty = caches.emptied(cache, Config())
    after = CODEC.pack_result([vars(layer) for layer in empty.layers])
    assert after[0] == before[0] and len(after[1]) == len(before[1]) > 0
    for got, expected in zip(after[1], before[1], strict=True):
        assert torch.equal(got, expected)
    assert [type(layer) for layer in empty.layers] == [type(layer) for layer in kinds]
    assert kinds[0].conv_states[0] is not None and kinds[3].seen == 7, "the cache itself is used on"


def test_a_layer_of_a_cache_that_cannot_be_made_anew_is_refused_with_the_remedy() -> None:
    cache_utils = pytest.importorskip("transformers.cache_utils")

    class Secret(cache_utils.DynamicLayer):  # type: ignore[misc,name-defined]
        def __init__(self, told_nowhere: int) -> None:
            super().__init__()

    cache = cache_utils.Cache(layers=[Secret(1)])
    caches.emptied(cache)
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    with pytest.raises(ValueError, match="class Secret.*told_nowhere.*use_cache=False"):
        caches.emptied(cache)


def test_states_of_a_recurrence_that_a_remote_layer_would_have_to_read_are_refused() -> None:
    cache_utils = pytest.importorskip("transformers.cache_utils")
    if not hasattr(cache_utils, "LinearAttentionAndFullAttentionLayer"):
        pytest.skip("an older transformers")
    both = cache_utils.LinearAttentionAndFullAttentionLayer
    cache = cache_utils.Cache(layers=[both(), both()])
    caches.check_unfilled(cache, frozenset({0, 1}), "h")
    cache.update_conv_state(torch.ones(1, 2, 4), 1)
    caches.check_unfilled(cache, frozenset({0}), "h.0")
    with pytest.raises(ValueError, match="layer 1.*use_cache=False"):
        caches.check_unfilled(cache, frozenset({1}), "h.1")
    # A module of this rank has left it there, whose layer a cut goes through.
    for here in ({1}, {caches.ALL_PLACES}):
        caches.check_unfilled(cache, frozenset({1}), "h.1", frozenset(here))
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 1)
    cache.update_recurrent_state(torch.ones(1, 2, 4), 1)
    with pytest.raises(ValueError, match="layer 1"):
        caches.check_unfilled(cache, frozenset({1}), "h.1", frozenset({1}))


class Attention(nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx


class Numbered(nn.Module):
    """A layer whose number is no place of its own; its attentions have places."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.attentions = nn.ModuleList(Attention(2 * layer_idx + i) for i in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x


class UsesItsOwn(Numbered):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return [x * self.layer_idx for _ in "1"][0]


def test_the_number_of_a_layer_is_no_place_in_a_cache_unless_its_code_uses_it() -> None:
    assert caches.layer_idxs(Numbered(1)) == {2, 3}
    assert caches.layer_idxs(UsesItsOwn(1)) == {1, 2, 3}
    assert caches.layer_idxs(Attention(1)) == {1}
    assert caches.layer_idxs_beside(Attention(7), Numbered(1).modules()) == {2, 3}
    assert caches.layer_idxs_beside(Attention(7), UsesItsOwn(1).modules()) == {1, 2, 3}
