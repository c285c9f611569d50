"""State dicts go to the distributed names and back without a bit of difference."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from smp.nn.huggingface import buffers, translation
from tests.reference import hugging_face as hf
from tests.reference.hugging_face import FAMILIES, HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY

NAMES = sorted(FAMILIES)
DECODERS = [name for name in NAMES if not FAMILIES[name].is_encoder]


def state_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return dict(model.state_dict())


def without_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in state_of(model).items() if name in parameters}


def assert_same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert got[name].dtype == value.dtype and got[name].device == value.device, name
        assert torch.equal(got[name], value), name


def note(name: str, model: Any) -> None:
    """Notes the facts about a model's buffers that replacing the model notes."""
    importlib.import_module(f"smp.nn.huggingface.{name}").FAMILY.note(model.config)


def layer_shapes(name: str, model: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters of one layer of smp's, written by hand."""
    h, i = HIDDEN, INTERMEDIATE if name not in ("gpt2", "gptneo") else 4 * HIDDEN
    shapes: dict[str, tuple[int, ...]] = {
        "attention.dense.weight": (h, h),
        "output.dense1.weight": (i, h),
        "output.dense2.weight": (h, i),
    }
    if name == "gptneox":
        shapes |= {"attention.query_key_value.weight": (3 * h, h)}
        shapes |= {"attention.query_key_value.bias": (3 * h,)}
    else:
        shapes |= {f"attention.{part}.weight": (h, h) for part in ("query", "key", "value")}
    if name in ("gpt2", "bert", "roberta"):
        shapes |= {f"attention.{part}.bias": (h,) for part in ("query", "key", "value")}
    if name in ("gpt2", "gptneo", "gptneox", "bert", "roberta"):
        shapes |= {"attention.dense.bias": (h,)}
    shapes |= {"output.dense1.bias": (i,), "output.dense2.bias": (h,)}
    place = "layernorm" if name in ("bert", "roberta") else "pre_layernorm"
    for part in ("attention",) if name == "gptj" else ("attention", "output"):
        shapes |= {f"{part}.{place}.{kind}": (h,) for kind in ("weight", "bias")}
    return shapes


# ---- both ways -----------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_head_model_comes_back_bitwise_with_the_same_keys(name: str) -> None:
    model = hf.family(name).build()
    note(name, model)
    theirs = state_of(model)
    ours = FAMILIES[name].to_smp(theirs)
    assert not set(ours) & {key for key in theirs if ".0." in key}, "layers kept their names"
    assert_same(FAMILIES[name].to_hf(ours), theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_types_are_kept(name: str, dtype: torch.dtype) -> None:
    model = hf.family(name).build().to(dtype)
    theirs = without_buffers(model)
    again = FAMILIES[name].to_hf(FAMILIES[name].to_smp(theirs))
    for key, value in theirs.items():
        assert again[key].dtype == dtype and torch.equal(again[key], value)


@pytest.mark.parametrize("name", NAMES)
def test_our_names_and_shapes_are_those_of_the_distributed_modules(name: str) -> None:
    family = hf.family(name)
    model = family.build()
    ours = family.to_smp(state_of(model))
    root = f"{name}.encoder.seq_layers" if family.is_encoder else "transformer.seq_layers"
    expected = {
        f"{root}.{layer}.{key}": shape
        for layer in range(LAYERS)
        for key, shape in layer_shapes(name, model).items()
    }
    if not family.is_encoder:
        expected |= {"word_embedding.weight": (VOCABULARY, HIDDEN), "layernorm.weight": (HIDDEN,)}
        expected |= {"lm_head.weight": (VOCABULARY, HIDDEN)}
        if name in ("gpt2", "gptneo"):
            expected |= {"position_embedding.weight": (hf.POSITIONS, HIDDEN)}
        if name == "gptj":
            expected |= {"lm_head.bias": (VOCABULARY,)}
        expected |= {"layernorm.bias": (HIDDEN,)}
        assert {key: tuple(value.shape) for key, value in ours.items()} == expected
    else:
        inside = {key: tuple(value.shape) for key, value in ours.items() if ".seq_layers." in key}
        assert inside == expected
        outside = {key: value for key, value in ours.items() if ".seq_layers." not in key}
        kept = {key: v for key, v in state_of(model).items() if ".encoder." not in key}
        assert_same(outside, kept)


@pytest.mark.parametrize("name", NAMES)
def test_queries_are_in_their_place(name: str) -> None:
    family = hf.family(name)
    model: Any = family.build()
    prefix = f"{name}.encoder." if family.is_encoder else "transformer."
    ours = family.to_smp(state_of(model))
    x = torch.randn(5, HIDDEN)
    attention = f"{prefix}seq_layers.1.attention"
    if name == "gptneox":
        layer = model.gpt_neox.layers[1].attention.query_key_value
        assert torch.equal(ours[f"{attention}.query_key_value.weight"], layer.weight)
        return
    projected = [
        torch.nn.functional.linear(
            x, ours[f"{attention}.{part}.weight"], ours.get(f"{attention}.{part}.bias")
        )
        for part in ("query", "key", "value")
    ]
    if name == "gpt2":
        expected = model.transformer.h[1].attn.c_attn(x).split(HIDDEN, dim=-1)
    elif name == "gptj":
        attn = model.transformer.h[1].attn
        expected = [attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)]
    elif name == "gptneo":
        attn = model.transformer.h[1].attn.attention
        expected = [attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)]
    elif family.is_encoder:
        attn = getattr(model, name).encoder.layer[1].attention.self
        expected = [attn.query(x), attn.key(x), attn.value(x)]
    else:
        attn = model.model.layers[1].self_attn
        expected = [attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)]
    for got, wanted in zip(projected, expected, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_both_directions_leave_a_dict_that_has_their_form(name: str) -> None:
    family = hf.family(name)
    model = family.build()
    note(name, model)
    theirs = state_of(model)
    ours = family.to_smp(theirs)
    assert_same(family.to_smp(ours), ours)
    assert_same(family.to_hf(theirs), theirs)


@pytest.mark.parametrize("name", NAMES)
def test_results_are_views(name: str) -> None:
    family = hf.family(name)
    theirs = without_buffers(family.build())
    ours = family.to_smp(theirs)
    again = family.to_hf(ours)
    storages = {value.untyped_storage().data_ptr() for value in theirs.values()}
    for result in (ours, {key: again[key] for key in theirs}):
        for key in set(result) - {f"{name}.embeddings.position_ids"}:
            value = result[key]
            assert value.untyped_storage().data_ptr() in storages, key


def test_parts_of_gpt2_that_are_tensors_of_their_own_are_joined() -> None:
    family = hf.family("gpt2")
    theirs = state_of(family.build())
    ours = {key: value.clone() for key, value in family.to_smp(theirs).items()}
    assert_same(family.to_hf(ours), theirs)


def test_join_does_not_take_neighbours_for_parts() -> None:
    whole = torch.arange(24.0).view(6, 4)
    parts = [whole[0:2], whole[2:4], whole[4:6]]
    joined = translation.join(parts)
    assert joined.data_ptr() == whole.data_ptr() and torch.equal(joined, whole)
    for wrong in (
        [whole[0:2], whole[4:6]],
        [whole[2:4], whole[0:2]],
        [whole[0:2], whole[2:4].clone()],
        [torch.empty(2, 3, device="meta"), torch.empty(2, 3, device="meta")],
    ):
        result = translation.join(wrong)
        if not result.is_meta:
            assert torch.equal(result, torch.cat(wrong))
            assert result.data_ptr() != wrong[0].data_ptr()
        assert result.shape == torch.cat(wrong).shape


# ---- other forms of dicts ------------------------------------------------------------


@pytest.mark.parametrize("name", DECODERS)
def test_names_of_a_base_model_without_prefix_are_accepted(name: str) -> None:
    family = hf.family(name)
    base = family.build("base")
    ours = family.to_smp(state_of(base))
    assert "word_embedding.weight" in ours and "layernorm.weight" in ours
    assert any(key.startswith("transformer.seq_layers.2.") for key in ours)
    assert not any(key.startswith(("h.", "layers.", "wte", "embed")) for key in ours)
    head = family.build()
    parameters = {k: v for k, v in family.to_smp(without_buffers(head)).items()}
    missing = set(parameters) - set(ours)
    assert missing <= {"lm_head.weight", "lm_head.bias"} and not set(ours) - set(parameters)


@pytest.mark.parametrize("name", DECODERS)
def test_a_base_model_of_its_own_comes_back_without_prefix(name: str) -> None:
    family = hf.family(name)
    base = family.build("base")
    note(name, base)
    to_hf, to_smp = family.translators.FAMILY.translators("base")
    theirs = state_of(base)
    assert_same(to_hf(to_smp(theirs)), theirs)
    inside = {f"backbone.{key}": value for key, value in theirs.items()}
    ours = to_smp(inside)
    assert "backbone.transformer.seq_layers.0.attention.dense.weight" in ours
    assert_same(to_hf(ours), inside)


@pytest.mark.parametrize("name", ["gpt2", "gptj", "gptneo", "gptneox"])
def test_a_base_model_below_another_head_keeps_its_place(name: str) -> None:
    family = hf.family(name)
    model = family.build("ForSequenceClassification", num_labels=3)
    note(name, model)
    theirs = state_of(model)
    ours = family.to_smp(theirs)
    base = family.translators.NAMES.base
    assert f"{base}transformer.seq_layers.0.attention.dense.weight" in ours
    assert f"{base}word_embedding.weight" in ours
    assert "score.weight" in ours
    assert_same(family.to_hf(ours), theirs)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_inside_of_another_one_is_found(name: str) -> None:
    family = hf.family(name)
    model = family.build()
    note(name, model)
    theirs = {f"inner.model_a.{key}": value for key, value in state_of(model).items()}
    theirs["head.weight"] = torch.ones(3)
    ours = family.to_smp(theirs)
    assert any(".seq_layers.0." in key for key in ours) and "head.weight" in ours
    assert all(key.startswith(("inner.model_a.", "head.")) for key in ours)
    assert_same(family.to_hf(ours), theirs)


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_translated_by_themselves(name: str) -> None:
    family = hf.family(name)
    model = family.build()
    layer = next(m for m in model.modules() if type(m).__name__ == family.layer)
    theirs = without_buffers(layer)
    to_hf, to_smp = family.translators.FAMILY.translators("layer")
    ours = to_smp(theirs)
    assert {key: tuple(value.shape) for key, value in ours.items()} == layer_shapes(name, model)
    assert_same(to_hf(ours), theirs)
    inside = {f"stack.2.{key}": value for key, value in theirs.items()}
    assert_same(to_hf(to_smp(inside)), inside)


@pytest.mark.parametrize("name", NAMES)
def test_the_public_names_translate_models_of_which_layers_were_replaced(name: str) -> None:
    family = hf.family(name)
    model = family.build()
    note(name, model)
    theirs = state_of(model)
    to_hf, to_smp = family.translators.FAMILY.translators("layer")
    some = {key: value for key, value in theirs.items() if ".1." not in key}
    for replaced in (theirs, some):
        ours = {**to_smp(replaced), **{k: v for k, v in theirs.items() if k not in replaced}}
        assert any(key.endswith(".0.attention.dense.weight") for key in ours)
        assert set(ours) != set(theirs) and not any("seq_layers" in key for key in ours)
        inside = {f"inner.{key}": value for key, value in ours.items()}
        for translate in (family.to_hf, to_hf):
            assert_same(translate(ours), theirs)
            back = translate(inside)
            assert_same({key.removeprefix("inner."): v for key, v in back.items()}, theirs)
        for other in FAMILIES.values():
            is_alike = {name, other.name} <= {"bert", "roberta"}
            if not (is_alike or name == other.name):
                assert_same(other.to_hf(ours), ours)
    model.load_state_dict(family.to_hf(ours), strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_two_families_in_one_dict_do_not_disturb_each_other(name: str) -> None:
    family = hf.family(name)
    model = family.build()
    note(name, model)
    theirs = {f"first.{key}": value for key, value in state_of(model).items()}
    ours = family.to_smp(theirs)
    for other_name in NAMES:
        if other_name == name or {name, other_name} == {"bert", "roberta"}:
            continue
        other = FAMILIES[other_name]
        assert_same(other.to_smp(theirs), theirs)
        assert_same(other.to_hf(ours), ours)
        second = other.build()
        note(other_name, second)
        both = theirs | {f"second.{key}": value for key, value in state_of(second).items()}
        translated = other.to_smp(family.to_smp(both))
        assert_same(other.to_hf(family.to_hf(translated)), both)


@pytest.mark.parametrize("name", NAMES)
def test_foreign_keys_stay(name: str) -> None:
    family = hf.family(name)
    theirs = state_of(family.build())
    tensor = torch.ones(2)
    adapter = next(key for key in theirs if ".1." in key and key.endswith("weight"))
    foreign = {"probe.weight": tensor, adapter.replace("weight", "lora_a"): tensor}
    ours = family.to_smp({**theirs, **foreign})
    for key in foreign:
        assert ours[key] is tensor
    back = family.to_hf(ours)
    for key in foreign:
        assert back[key] is tensor


def test_the_marker_of_partial_dicts_is_dropped() -> None:
    family = hf.family("gpt2")
    ours: dict[str, Any] = family.to_smp(state_of(family.build()))
    ours["_smp_is_partial"] = False
    assert "_smp_is_partial" not in family.to_hf(ours)
    to_hf, _ = family.translators.FAMILY.translators("layer")
    assert to_hf({"_smp_is_partial": True}) == {}


def test_the_input_stays_as_it_was() -> None:
    family = hf.family("gpt2")
    theirs = OrderedDict(family.build().state_dict())
    before = list(theirs.items())
    ours = family.to_smp(theirs)
    assert list(theirs.items()) == before
    names = list(ours)
    family.to_hf(ours)
    assert list(ours) == names


# ---- tied parameters -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "gptneo"])
def test_a_tied_head_comes_back_under_both_names_as_one_tensor(name: str) -> None:
    family = hf.family(name)
    model = family.build()
    note(name, model)
    theirs = state_of(model)
    dropped = {key: value for key, value in theirs.items() if key != "lm_head.weight"}
    ours = family.to_smp(dropped)
    assert_same(ours, family.to_smp(theirs))
    back = family.to_hf(ours)
    assert back["lm_head.weight"] is back["transformer.wte.weight"]
    assert_same(back, theirs)
    model.load_state_dict(back, strict=True)


@pytest.mark.parametrize("name", ["gpt2", "gptneo", "gptj", "gptneox"])
def test_an_untied_head_is_kept(name: str) -> None:
    family = hf.family(name)
    model: Any = family.build(tie_word_embeddings=False)
    note(name, model)
    theirs = state_of(model)
    ours = family.to_smp(theirs)
    assert ours["lm_head.weight"].shape == (VOCABULARY, HIDDEN)
    assert not torch.equal(ours["lm_head.weight"], ours["word_embedding.weight"])
    assert_same(family.to_hf(ours), theirs)


def test_the_head_of_gptneox_is_known_by_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    family = hf.family("gptneox")
    theirs = state_of(family.build())
    head = "lm_head.weight" if "lm_head.weight" in theirs else "embed_out.weight"
    ours = family.to_smp(theirs)
    for name in ("lm_head.weight", "embed_out.weight"):
        named = {name if key == head else key: value for key, value in theirs.items()}
        assert_same(family.to_smp(named), ours)
        assert head in family.to_hf(family.to_smp(named))
    monkeypatch.setattr("smp.nn.huggingface.installed._sample", lambda name: None)
    assert "embed_out.weight" in family.to_hf(ours)  # as most releases have it


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_tied_parameters_of_heads_that_stay_are_filled_in(name: str) -> None:
    family = hf.family(name)
    model = family.build()
    note(name, model)
    theirs = state_of(model)
    head = "cls.predictions" if name == "bert" else "lm_head"
    tied = {f"{head}.decoder.weight", f"{head}.decoder.bias"}
    assert tied <= set(theirs)
    dropped = {key: value for key, value in theirs.items() if key not in tied}
    ours = family.to_smp(dropped)
    assert tied <= set(ours)
    table = f"{name}.embeddings.word_embeddings.weight"
    assert ours[f"{head}.decoder.weight"] is ours[table]
    partial = {key: value for key, value in ours.items() if key not in tied}
    assert_same(family.to_hf(partial), theirs)
    classifier = family.build("ForSequenceClassification")
    note(name, classifier)
    theirs = state_of(classifier)
    assert_same(family.to_hf(family.to_smp(theirs)), theirs)


# ---- names -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_documented_name_is_one_function(name: str) -> None:
    module = importlib.import_module(f"smp.nn.huggingface.{name}")
    names = [
        f"translate_hf_state_dict_to_smdistributed_{name}",
        "translate_hf_state_dict_to_smdistributed",
        "translate_state_dict_to_smdistributed",
    ]
    if name == "gptj":
        names += [
            "translate_hf_gptj_state_dict_to_smdistributed_gptj",
            "translate_hf_gptj_state_dict_to_smdistributed",
        ]
    functions = {getattr(module, name) for name in names}
    assert len(functions) == 1
    to_smp = functions.pop()
    assert to_smp({}, max_seq_len=5) == {}
    to_hf = getattr(module, f"translate_state_dict_to_hf_{name}")
    assert to_hf({}, max_seq_len=5) == {} and to_hf({}, 5) == {}


# ---- buffers -----------------------------------------------------------------------------


def buffers_of(model: torch.nn.Module) -> dict[str, Tensor]:
    parameters = without_buffers(model)
    return {key: value for key, value in state_of(model).items() if key not in parameters}


@pytest.mark.parametrize("name", NAMES)
def test_buffers_of_theirs_are_dropped_on_the_way_in(name: str) -> None:
    family = hf.family(name)
    theirs = state_of(family.build())
    rows = {
        "gpt2": ("transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"),
        "gptj": ("transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"),
        "gptneo": (
            "transformer.h.0.attn.attention.bias",
            "transformer.h.0.attn.attention.masked_bias",
        ),
        "gptneox": (
            "gpt_neox.layers.0.attention.bias",
            "gpt_neox.layers.0.attention.masked_bias",
            "gpt_neox.layers.0.attention.rotary_emb.inv_freq",
        ),
        "bert": (),
        "roberta": (),
    }[name]
    ours = family.to_smp({**theirs, **{row: torch.ones(1) for row in rows}})
    assert not set(rows) & set(ours)
    assert_same(ours, family.to_smp(theirs))


@pytest.mark.parametrize("name", NAMES)
def test_buffers_that_are_not_known_are_left_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "_facts", {})
    family = hf.family(name)
    model = family.build()
    ours = family.to_smp(without_buffers(model))
    left_out = set(state_of(model)) - set(family.to_hf(ours))
    assert all(key.endswith((".bias", "inv_freq")) for key in left_out)
    assert left_out <= set(buffers_of(model))
    with_size = family.to_hf(ours, max_seq_len=hf.POSITIONS)
    for key, value in buffers_of(model).items():
        if key in with_size:
            assert torch.equal(with_size[key], value), key
    if name in ("gpt2", "gptj", "bert", "roberta"):
        assert_same(with_size, state_of(model))


def test_without_transformers_buffers_come_with_a_length_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = hf.family("gpt2")
    model = family.build()
    ours = family.to_smp(without_buffers(model))
    monkeypatch.setattr("smp.nn.huggingface.installed._sample", lambda name: None)
    assert_same(family.to_hf(ours), without_buffers(model))
    added = family.to_hf(ours, max_seq_len=5)
    mask = added["transformer.h.2.attn.bias"]
    assert mask.dtype == torch.uint8 and mask.shape == (1, 1, 5, 5)
    assert torch.equal(mask[0, 0], torch.ones(5, 5, dtype=torch.uint8).tril())
    assert added["transformer.h.0.attn.masked_bias"] == -1e4
    encoder = FAMILIES["bert"]
    theirs = without_buffers(encoder.build())
    assert_same(encoder.to_hf(encoder.to_smp(theirs)), theirs)
    positions = encoder.to_hf(encoder.to_smp(theirs), max_seq_len=7)
    assert positions["bert.embeddings.position_ids"].tolist() == [list(range(7))]


@pytest.mark.parametrize("name", NAMES)
def test_the_result_loads_strictly_into_an_unmodified_model(name: str) -> None:
    family = hf.family(name)
    model = family.build(seed=3)
    note(name, model)
    ours = family.to_smp(state_of(model))
    other = family.build(seed=4)
    other.load_state_dict(family.to_hf(ours), strict=True)
    assert_same(state_of(other), state_of(model))
