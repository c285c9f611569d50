"""Every configuration field of a family is honoured, or declined with a reason."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import smp
from smp.nn import huggingface
from smp.tensor_parallel import registry
from smp.tensor_parallel.registry import Declined
from tests.reference import hugging_face as hf
from tests.reference.hf_hooks import (
    ENCODERS,
    NAMES,
    edited,
    new_fields,
    options,
    reason,
    registration,
)
from tests.reference.hugging_face import HEADS, HIDDEN, LAYERS

pytestmark = pytest.mark.usefixtures("running")


# ---- sizes and dropouts, all families ----------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_dropouts(name: str) -> None:
    fields = {
        "gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
        "gptj": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
        "gptneo": ("attention_dropout", "resid_dropout", "embed_dropout"),
        "gptneox": ("attention_dropout", "hidden_dropout", "hidden_dropout"),
        "bert": ("attention_probs_dropout_prob", "hidden_dropout_prob", None),
        "roberta": ("attention_probs_dropout_prob", "hidden_dropout_prob", None),
    }.get(name, ("attention_dropout", None, None))
    ours = ("attention_dropout_prob", "hidden_dropout_prob", "embedding_dropout_prob")
    for field in fields:
        if field is None:
            continue
        got = options(name, **{field: 0.3})
        known = field in type(hf.family(name).config()).__init__.__code__.co_varnames or (
            new_fields(name) or name != "gptneox"
        )
        changed = {our for theirs, our in zip(fields, ours, strict=True) if theirs == field}
        for our in ours:
            expected = 0.3 if our in changed and known else 0.0
            assert (got.get(our) or 0.0) == expected, (field, our)


@pytest.mark.parametrize("name", NAMES)
def test_epsilon_and_initializer(name: str) -> None:
    epsilon = {
        "gpt2": "layer_norm_epsilon", "gptj": "layer_norm_epsilon", "gptneo": "layer_norm_epsilon",
    }.get(name, "layer_norm_eps")  # fmt: skip
    got = options(name, **{epsilon: 3e-4, "initializer_range": 0.3})
    assert got["layernorm_epsilon"] == 3e-4 and got["initializer_range"] == 0.3
    assert got["use_normal_initialization"]
    if name == "gpt2":
        assert got["residual_init_std"] == 0.3 / math.sqrt(2 * LAYERS)
    else:
        assert got.get("residual_init_std") is None


@pytest.mark.parametrize("name", NAMES)
def test_activations(name: str) -> None:
    field = "activation_function" if name in ("gpt2", "gptj", "gptneo") else "hidden_act"
    known = {"gelu": "gelu", "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new"}
    known |= {"gelu_fast": "gelu_new", "gelu_python": "gelu", "relu": "relu"}
    for theirs, ours in known.items():
        assert options(name, **{field: theirs})["activation"] == ours
    for value in ("quick_gelu", "tanh", "mish", "silu"):
        text = reason(name, edited(name, **{field: value}))
        assert field in text and repr(value) in text and "gelu_new" in text
    config = hf.family(name).config()
    config.__dict__[field] = torch.nn.functional.gelu  # newer releases refuse it themselves
    assert field in reason(name, config)


@pytest.mark.parametrize("name", ["gptj", "gptneo"])
def test_scores_are_computed_in_fp32(name: str) -> None:
    assert options(name)["attention_in_fp32"]


@pytest.mark.parametrize("name", NAMES)
def test_configurations_that_ask_for_more_outputs_are_declined(name: str) -> None:
    for field in ("output_attentions", "output_hidden_states"):
        config = hf.family(name).config()
        config._attn_implementation = "eager"
        setattr(config, field, True)
        assert field in reason(name, config)


@pytest.mark.parametrize("name", NAMES)
def test_use_cache_changes_nothing(name: str) -> None:
    assert options(name, use_cache=True) == options(name, use_cache=False)


# ---- GPT-2 ---------------------------------------------------------------------------------


def test_gpt2_layers_know_their_number() -> None:
    got = options("gpt2", "layer", 2, scale_attn_by_inverse_layer_idx=True)
    assert got["layer_idx"] == 2 and got["scale_attn_by_layer_idx"] is True
    declined = options("gpt2", "layer", scale_attn_by_inverse_layer_idx=True)
    assert isinstance(declined, Declined) and "number of the layer" in declined.reason


# ---- GPT-J ---------------------------------------------------------------------------------


def test_gptj_rotation() -> None:
    got = options("gptj", rotary_dim=2)
    assert got["rotary_dim"] == 2 and got["rotary_interleaved"] is True
    assert got.get("rotary_base", 10000.0) == 10000.0
    assert options("gptj", rotary_dim=HIDDEN // HEADS)["rotary_dim"] == HIDDEN // HEADS
    for value in (3, 64):
        assert f"rotary_dim is {value}" in reason("gptj", edited("gptj", rotary_dim=value))
    config = edited("gptj", n_head=3)
    config.__dict__["rotary_dim"] = None  # which newer releases refuse in their own way
    hook = registration("gptj").init_hook
    assert hook is not None
    result = hook(config)
    assert not isinstance(result, Declined) and result is not None
    assert result[1]["rotary_dim"] == HIDDEN // 3


# ---- GPT-Neo --------------------------------------------------------------------------------


def test_gptneo_windows() -> None:
    assert options("gptneo")["window_size"] == [None, 3, None]
    got = options("gptneo", attention_types=[[["local"], 2], [["global"], 1]], window_size=5)
    assert got["window_size"] == [5, 5, None]
    assert options("gptneo", "layer", 1)["window_size"] == 3
    assert options("gptneo", "layer", 2)["window_size"] is None
    text = reason("gptneo", edited("gptneo", attention_layers=["global", "sparse", "local"]))
    assert "attention_layers" in text and "sparse" in text


# ---- GPT-NeoX -------------------------------------------------------------------------------


def test_gptneox_rotation() -> None:
    got = options("gptneox", rotary_pct=1.0, rotary_emb_base=500)
    assert got["rotary_dim"] == HIDDEN // HEADS and got["rotary_base"] == 500.0
    assert not got.get("rotary_interleaved", False)
    assert options("gptneox", rotary_pct=0.4)["rotary_dim"] == 2
    assert options("gptneox", rotary_pct=0.0)["rotary_dim"] is None
    declined = options("gptneox", rotary_pct=0.5)
    assert isinstance(declined, Declined) and "3 of 6 channels" in declined.reason


def test_gptneox_activation_changed_after_the_model_was_made() -> None:
    model: Any = hf.family("gptneox").build()
    huggingface.register_available()
    model.gpt_neox.config.hidden_act = "gelu_new"
    arguments = registry.arguments_of(model)
    hook = registration("gptneox").init_hook
    assert arguments is not None and hook is not None
    result = hook(*arguments[0], **arguments[1])
    assert not isinstance(result, Declined) and result is not None
    assert result[1]["activation"] == "gelu_new"


def test_gptneox_without_attention_biases_is_declined() -> None:
    if not new_fields("gptneox"):
        assert not isinstance(options("gptneox", attention_bias=False), Declined)  # no such field
        return
    assert "attention_bias" in reason("gptneox", edited("gptneox", attention_bias=False))


def test_scaled_rotation_is_declined() -> None:
    config = hf.family("gptneox").config()
    if not new_fields("gptneox"):
        config.rope_scaling = {"type": "linear", "factor": 2.0}  # which that release ignores
        hook = registration("gptneox").init_hook
        assert hook is not None and not isinstance(hook(config), Declined)
        return
    assert config.rope_parameters["rope_type"] == "default"
    for kind in ("linear", "dynamic", "yarn", "llama3"):
        config.rope_parameters = {**config.rope_parameters, "rope_type": kind, "factor": 2.0}
        text = reason("gptneox", config)
        assert "rope_parameters" in text and kind in text and "'default'" in text


def test_scaled_rotation_of_releases_between_is_declined() -> None:
    class Config:
        """A configuration of releases that have ``rope_scaling``."""

        def __init__(self, rope_theta: float, rope_scaling: Any) -> None:
            self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
            self.hidden_size, self.num_attention_heads = HIDDEN, HEADS

    from smp.nn.huggingface.rotary import rotary_of

    plain = rotary_of(Config(500.0, None))
    assert (plain.dim, plain.base) == (HIDDEN // HEADS, 500.0)
    assert rotary_of(Config(500.0, {"type": "default"})) == plain
    with pytest.raises(smp.nn.Unsupported, match="rope_scaling.*linear"):
        rotary_of(Config(500.0, {"type": "linear", "factor": 2.0}))


# ---- encoders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_fields_that_are_declined(name: str) -> None:
    changes: dict[str, Any] = {"is_decoder": True, "add_cross_attention": True}
    changes |= {"chunk_size_feed_forward": 2}
    for field, value in changes.items():
        text = reason(name, edited(name, **{field: value}))
        assert f"{field} is {value!r}" in text and "supported is" in text
        assert field in reason(name, edited(name, **{field: value}), "layer")
    for value in ("relative_key", "relative_key_query"):
        text = reason(name, edited(name, position_embedding_type=value))
        assert "position_embedding_type" in text and value in text
    assert not isinstance(options(name, position_embedding_type="absolute"), Declined)
