"""A model whose layers were replaced computes what the plain model computes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import smp
from smp.replacement import replace_marked
from smp.step.microbatch import join
from tests.reference import hugging_face as hf
from tests.reference.hf_parity import (
    BATCH,
    DECODERS,
    NAMES,
    SEQUENCE,
    TOLERANCES,
    compare,
    difference_of_logits,
    gradients,
    make_batch,
    pair,
    replaced,
)
from tests.reference.hugging_face import HIDDEN, LAYERS, VOCABULARY
from tests.reference.lifted_casts import lifted_casts
from tests.reference.tolerances import assert_close, relative_difference

pytestmark = pytest.mark.usefixtures("running")


# ---- whole models ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_loss_logits_and_gradients(name: str, dtype: torch.dtype) -> None:
    compare(name, pair(name, dtype), make_batch(name), dtype)


@pytest.mark.parametrize("name", NAMES)
def test_close_to_the_model_with_its_casts(name: str) -> None:
    """The helper that lifts casts changes the reference by rounding only."""
    family = hf.family(name)
    untouched = family.build().double()
    _, ours = pair(name, torch.float64)
    batch = make_batch(name)
    expected, got = untouched(**batch), ours(**batch)
    assert difference_of_logits(got, expected, batch) <= 1e-5
    assert abs(got["loss"].item() - expected["loss"].item()) <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_state_comes_back_bitwise(name: str) -> None:
    family = hf.family(name)
    plain = family.build().state_dict()
    back = family.to_hf(replaced(family.build()).state_dict())
    assert set(back) == set(plain)
    for key, value in plain.items():
        assert torch.equal(back[key], value), key


VARIANTS = {
    "gpt2-unscaled": ("gpt2", {"scale_attn_weights": False}),
    "gpt2-by-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-inner": ("gpt2", {"n_inner": 20, "activation_function": "gelu"}),
    "gpt2-relu": ("gpt2", {"activation_function": "relu"}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False}),
    "gptj-tied": ("gptj", {"tie_word_embeddings": True}),
    "gptj-inner": ("gptj", {"n_inner": 20}),
    "gptj-whole-head": ("gptj", {"rotary_dim": 6}),
    "gptneo-windows": ("gptneo", {"attention_types": [[["local"], 3]], "window_size": 2}),
    "gptneo-untied": ("gptneo", {"tie_word_embeddings": False}),
    "gptneo-inner": ("gptneo", {"intermediate_size": 20}),
    "gptneox-tied": ("gptneox", {"tie_word_embeddings": True}),
    "gptneox-serial": ("gptneox", {"use_parallel_residual": False}),
    "gptneox-whole-head": ("gptneox", {"rotary_pct": 1.0, "rotary_emb_base": 500}),
    "gptneox-unrotated": ("gptneox", {"rotary_pct": 0.0}),
    "gptneox-tanh": ("gptneox", {"hidden_act": "gelu_new"}),
    "bert-relu": ("bert", {"hidden_act": "relu", "layer_norm_eps": 1e-3}),
    "roberta-tanh": ("roberta", {"hidden_act": "gelu_new"}),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_configuration_fields_have_their_effect(variant: str) -> None:
    name, changes = VARIANTS[variant]
    if variant == "gptneox-unrotated" and hf.is_older():
        pytest.skip("transformers 4.30.2 cannot rotate nothing")
    compare(name, pair(name, torch.float64, **changes), make_batch(name), torch.float64)
    batch = make_batch(name)
    usual, changed = hf.family(name).build().double(), hf.family(name).build(**changes).double()
    if "untied" in variant or "-tied" in variant or "inner" in variant:
        return  # other parameters
    assert relative_difference(usual(**batch)["loss"], changed(**batch)["loss"]) > 1e-7


def test_gpt2_upcast_attention() -> None:
    models = pair("gpt2", torch.float32, reorder_and_upcast_attn=True)
    models[0].config._attn_implementation = "eager"
    compare("gpt2", models, make_batch("gpt2"), torch.float32)
    half = hf.family("gpt2").build(reorder_and_upcast_attn=True).bfloat16()
    new = replaced(half)
    assert new.transformer.seq_layers[0].attention._scoring.in_fp32


@pytest.mark.parametrize("name", DECODERS)
def test_left_padding_and_positions(name: str) -> None:
    batch = make_batch(name, left=True)
    mask = batch["attention_mask"]
    # A first token would be predicted from padding.
    batch["labels"] = batch["labels"].masked_fill(mask.cumsum(1) == 1, -100)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    plain, ours = pair(name, torch.float64)
    with lifted_casts():
        expected = plain(**batch, position_ids=positions)
    got = ours(**batch, position_ids=positions)
    assert difference_of_logits(got, expected, batch) <= 1e-9
    assert relative_difference(got["loss"], expected["loss"]) <= 1e-9
    shifted = ours(**batch, position_ids=positions + 2)
    if name in ("gpt2", "gptneo"):
        assert relative_difference(shifted["loss"], got["loss"]) > 1e-6


@pytest.mark.parametrize("name", ["gpt2", "gptj", "gptneo"])
def test_token_types_are_words(name: str) -> None:
    batch = make_batch(name)
    batch["token_type_ids"] = (torch.arange(SEQUENCE) % 3).expand(BATCH, -1)
    compare(name, pair(name, torch.float64), batch, torch.float64)


@pytest.mark.parametrize("only", [(), ("GPT2Block",)], ids=["whole", "layers"])
def test_gpt2_cross_attention(only: tuple[str, ...]) -> None:
    models = pair("gpt2", torch.float64, only=only, add_cross_attention=True)
    batch: dict[str, Any] = make_batch("gpt2")
    generator = torch.Generator().manual_seed(3)
    batch["encoder_hidden_states"] = torch.randn(
        BATCH, 5, HIDDEN, generator=generator, dtype=torch.float64
    )
    batch["encoder_attention_mask"] = (torch.arange(5) < torch.tensor([[5], [2], [3], [1]])).long()
    compare("gpt2", models, batch, torch.float64, of_layers=bool(only))


@pytest.mark.parametrize("only", [(), ("GPT2Block",)], ids=["whole", "layers"])
def test_gpt2_leaves_cross_attention_out_without_states(only: tuple[str, ...]) -> None:
    models = pair("gpt2", torch.float64, only=only, add_cross_attention=True)
    compare("gpt2", models, make_batch("gpt2"), torch.float64, of_layers=bool(only))
    crossing = [p.grad for n, p in models[1].named_parameters() if "cross_attention." in n]
    assert len(crossing) >= 8 * LAYERS and all(grad is None for grad in crossing)


# ---- parts of models -----------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_base_models(name: str) -> None:
    plain, ours = pair(name, torch.float64, "base")
    batch = make_batch(name)
    batch.pop("labels")
    with lifted_casts():
        expected = plain(**batch)
    got = ours(**batch)
    assert isinstance(got, type(expected)) and "past_key_values" not in got
    counted = batch["attention_mask"].bool()
    assert got[0] is got.last_hidden_state
    assert relative_difference(got[0][counted], expected[0][counted]) <= 1e-9
    as_tuple = ours(**batch, return_dict=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], got[0])


@pytest.mark.parametrize("name", NAMES)
def test_classifiers_on_a_replaced_base_model(name: str) -> None:
    token = 1 if name == "roberta" else 0
    models = pair(
        name, torch.float64, "ForSequenceClassification", num_labels=3, pad_token_id=token
    )
    batch = make_batch(name)
    batch["labels"] = torch.tensor([0, 2, 1, 2])
    assert not isinstance(models[1], smp.nn.DistributedModule)
    compare(name, models, batch, torch.float64)


def test_gpt2_with_two_heads() -> None:
    """The base model is replaced where its table is not that of a head which stays."""
    tied = hf.family("gpt2").build("DoubleHeadsModel")
    smp.set_tensor_parallelism(tied)
    tied, _ = replace_marked(tied, torch.device("cpu"))
    assert not isinstance(tied.transformer, smp.nn.DistributedModule)
    plain, ours = pair("gpt2", torch.float64, "DoubleHeadsModel", tie_word_embeddings=False)
    ids = torch.randint(0, VOCABULARY, (2, 3, 5), generator=torch.Generator().manual_seed(1))
    with lifted_casts():
        expected = plain(input_ids=ids, mc_token_ids=torch.full((2, 3), 4))
    got = ours(input_ids=ids, mc_token_ids=torch.full((2, 3), 4))
    assert isinstance(ours.transformer, smp.nn.DistributedTransformerLMHead)
    for key in ("logits", "mc_logits"):
        assert relative_difference(got[key], expected[key]) <= 1e-9


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_single_layers(name: str, cache: bool) -> None:
    family = hf.family(name)
    models = pair(name, torch.float64, only=(family.layer,), use_cache=cache)
    layers = [m for m in models[1].modules() if isinstance(m, smp.nn.DistributedTransformerLayer)]
    assert len(layers) == LAYERS and type(models[0]) is type(models[1])
    plain, ours = models
    batch = make_batch(name)
    with lifted_casts():
        expected, got = plain(**batch), ours(**batch)
    assert difference_of_logits(got, expected, batch) <= 1e-9
    expected["loss"].backward()
    got["loss"].backward()
    to_hf, _ = family.translators.FAMILY.translators("layer")
    whole, wanted = to_hf(gradients(ours)), gradients(plain)
    assert_close({k: whole[k] for k in wanted}, wanted, torch.float64, name, 1e-9)
    without = {key: value for key, value in batch.items() if key != "attention_mask"}
    with lifted_casts():
        expected, got = plain(**without), ours(**without)
    assert relative_difference(got["logits"], expected["logits"]) <= 1e-9
    plain.load_state_dict(family.to_hf(ours.state_dict()), strict=True)


def test_a_declined_model_leaves_its_parts_to_others(caplog: pytest.LogCaptureFixture) -> None:
    model = hf.family("gpt2").build(activation_function="quick_gelu", tie_word_embeddings=False)
    smp.set_tensor_parallelism(model)
    new, _ = replace_marked(model, torch.device("cpu"))
    assert new is model
    said = [record.getMessage() for record in caplog.records if record.name == "smp"]
    lines = [line for line in said if "quick_gelu" in line]
    assert len(lines) == 3, said  # model, base model and layers, each once
    assert "activation_function" in lines[0] and "gelu_new" in lines[0]


# ---- results ---------------------------------------------------------------------------------


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often logits were gathered."""
    from smp.nn import lm_head

    counts: list[int] = []
    original = lm_head.LMHeadOutput.logits.fget
    assert original is not None

    def counted(self: Any) -> Tensor:
        if self._logits is None:
            counts.append(1)
        return original(self)

    monkeypatch.setattr(lm_head.LMHeadOutput, "logits", property(counted))
    return counts


def result_of(name: str, **changes: Any) -> Any:
    return replaced(hf.family(name).build())(**{**make_batch(name), **changes})


@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_gathered_when_they_are_read(name: str, gathers: list[int]) -> None:
    import transformers

    got = result_of(name)
    assert isinstance(got, dict) and isinstance(got, transformers.utils.ModelOutput)
    assert list(got.keys()) == list(got) == ["loss", "logits"]
    assert "logits" in got and "past_key_values" not in got and len(got) == 2
    assert got["loss"] is got.loss is got[0] and got.past_key_values is None
    assert got.get("loss") is got.loss and got.get("nothing", 3) == 3
    assert "not read" in repr(got)
    assert not gathers
    logits = got.logits
    assert logits.shape == (BATCH, SEQUENCE, VOCABULARY) and gathers == [1]
    for again in (got["logits"], got[1], got.to_tuple()[1], got[:2][1], dict(got)["logits"]):
        assert again is logits
    assert {**got}["logits"] is logits and dict(got.items())["logits"] is logits
    assert list(got.values())[1] is logits and gathers == [1]
    with pytest.raises(KeyError):
        got["hidden_states"]
    with pytest.raises(IndexError):
        got[2]


def test_lazy_results_survive_what_is_done_to_results(gathers: list[int]) -> None:
    import transformers

    base = transformers.modeling_outputs.CausalLMOutputWithPast
    got = result_of("gptneox")
    leaves, spec = pytree.tree_flatten(got)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    detached = pytree.tree_map_only(Tensor, lambda t: t.detach(), got)
    shallow = copy.copy(got)
    rebuilt = pytree.tree_unflatten(leaves, spec)
    travelled = pickle.loads(pickle.dumps(detached))
    assert not gathers
    for other in (detached, shallow, rebuilt, travelled):
        assert isinstance(other, base) and list(other) == ["loss", "logits"]
        assert torch.equal(other.logits, got.logits) and torch.equal(other.loss, got.loss)
    assert not detached.logits.requires_grad and got.logits.requires_grad
    made = type(got)({"loss": got.loss, "logits": got.logits})
    assert isinstance(made, base) and made["logits"] is got.logits
    named = type(got)(loss=got.loss, logits=got.logits)
    assert isinstance(named, base) and named.logits is got.logits
    joined = join([got, detached], detach=True)
    assert isinstance(joined, base) and joined["logits"].outputs[0].shape == got.logits.shape
    assert joined.loss.outputs[1].dim() == 0


def test_a_result_can_be_changed() -> None:
    got = result_of("gpt2")
    got["logits"] = torch.ones(1)
    got.loss = torch.zeros(())
    assert got.logits is got["logits"] and got["loss"] == 0
    got.logits = torch.zeros(2)
    assert got["logits"].shape == (2,)


@pytest.mark.parametrize("name", DECODERS)
def test_tuples_and_results_without_labels(name: str) -> None:
    new = replaced(hf.family(name).build())
    batch = make_batch(name)
    full = new(**batch)
    as_tuple = new(**batch, return_dict=False)
    assert isinstance(as_tuple, tuple) and len(as_tuple) == 2
    assert torch.equal(as_tuple[0], full.loss) and torch.equal(as_tuple[1], full.logits)
    batch.pop("labels")
    bare = new(**batch)
    assert list(bare) == ["logits"] and bare.loss is None
    assert torch.equal(bare.logits, full.logits)
    (only,) = new(**batch, return_dict=False)
    assert torch.equal(only, full.logits)
    new.config.return_dict = False
    assert isinstance(new(**batch), tuple)


@pytest.mark.parametrize("name", DECODERS)
def test_logits_to_keep(name: str) -> None:
    if hf.is_older():
        pytest.skip("transformers 4.30.2 has no logits_to_keep")
    family = hf.family(name)
    plain, new = family.build(), replaced(family.build())
    batch = make_batch(name)
    labels = batch.pop("labels")
    mask = torch.zeros(BATCH, SEQUENCE, dtype=torch.bool)
    mask[1, 2] = mask[3, :4] = True
    indices = torch.tensor([[0, 3], [1, 1], [6, 2], [5, 4]])
    for keep in (0, 1, 3, torch.tensor([0, 4, 5]), indices, mask):
        expected = plain(batch["input_ids"], logits_to_keep=keep).logits
        got = new(batch["input_ids"], logits_to_keep=keep).logits
        assert got.shape == expected.shape
        assert relative_difference(got, expected) <= 1e-4
    lazy = new(**batch, labels=labels, logits_to_keep=2)
    assert lazy.logits.shape == (BATCH, 2, VOCABULARY)
    assert torch.equal(lazy.loss, new(**batch, labels=labels).loss)
