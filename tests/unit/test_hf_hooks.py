"""Each configuration field of a family is honoured or declined, each argument taken or refused."""

from __future__ import annotations

import importlib
import inspect
import math
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import smp
from smp.nn import huggingface
from smp.nn.huggingface import pretrained
from smp.nn.huggingface.family import Kind
from smp.nn.huggingface.register import FAMILIES as REGISTERED
from smp.replacement import replace_marked
from smp.tensor_parallel import registry
from smp.tensor_parallel.registry import Declined, Registration
from tests.reference import hugging_face as hf
from tests.reference.hugging_face import FAMILIES, HEADS, HIDDEN, INTERMEDIATE, LAYERS

GPTS = ["gpt2", "gptj", "gptneo", "gptneox"]
LLAMAS = ["llama", "mistral", "qwen2"]
ENCODERS = ["bert", "roberta"]
NAMES = [*GPTS, *ENCODERS, *LLAMAS]


@pytest.fixture(autouse=True)
def initialised() -> Iterator[None]:
    smp.init({})
    yield
    smp.shutdown()


def registration(name: str, kind: Kind | None = None) -> Registration:
    family = hf.family(name)
    family.build()  # imports what is registered
    huggingface.register_available()
    spec = family.translators.FAMILY
    modeling = importlib.import_module(spec.modeling)
    wanted: Kind = kind or ("stack" if family.is_encoder else "head")
    return registry._registrations[getattr(modeling, spec.classes[wanted])]


def options(
    name: str, kind: Kind | None = None, /, number: int | None = None, **changes: Any
) -> Any:
    """What the hook makes of a configuration, or why it declines."""
    hook = registration(name, kind).init_hook
    assert hook is not None
    config = hf.family(name).config(**changes)
    result = hook(config) if number is None else hook(config, number)
    if isinstance(result, Declined):
        return result
    assert result is not None
    args, kwargs = result
    assert tuple(args) == ()
    return dict(kwargs)


def reason(name: str, config: Any, kind: Kind | None = None) -> str:
    hook = registration(name, kind).init_hook
    assert hook is not None
    result = hook(config)
    assert isinstance(result, Declined), result
    return result.reason


def edited(name: str, **changes: Any) -> Any:
    """A configuration that was changed after it was made, as scripts do."""
    config = hf.family(name).config()
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def new_fields(name: str) -> bool:
    """Does the installed release have the fields of releases since 5?"""
    return hasattr(hf.family(name).config(), "rope_parameters")


# ---- sizes and dropouts, all families ----------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_sizes(name: str) -> None:
    got = options(name)
    intermediate = 4 * HIDDEN if name in ("gpt2", "gptneo") else INTERMEDIATE
    expected = {
        "num_layers": LAYERS,
        "num_attention_heads": HEADS,
        "attention_head_size": HIDDEN // HEADS,
        "hidden_size": HIDDEN,
        "intermediate_size": intermediate,
        "initializer_range": 0.02,
        "use_normal_initialization": True,
    }
    if name not in ENCODERS:
        expected |= {
            "vocab_size": hf.VOCABULARY,
            "num_positions": hf.POSITIONS,
            "causal_mask_size": hf.POSITIONS,
        }
    assert {key: got[key] for key in expected} == expected
    post = name in ENCODERS
    assert (got["pre_layernorm"], got["post_layernorm"]) == (not post, post)
    if post:
        assert "causal_mask_size" not in got
    else:
        assert got.get("use_position_embedding", True) == (name in ("gpt2", "gptneo"))


@pytest.mark.parametrize("name", ["gpt2", "gptj", "gptneo"])
def test_inner_size(name: str) -> None:
    field = "intermediate_size" if name == "gptneo" else "n_inner"
    assert options(name, **{field: None})["intermediate_size"] == 4 * HIDDEN
    assert options(name, **{field: 20})["intermediate_size"] == 20


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
            new_fields(name) or name not in ("gptneox", "llama")
        )
        changed = {our for theirs, our in zip(fields, ours, strict=True) if theirs == field}
        for our in ours:
            expected = 0.3 if our in changed and known else 0.0
            assert (got.get(our) or 0.0) == expected, (field, our)
    if name in LLAMAS:
        assert options(name)["hidden_dropout_prob"] == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_epsilon_and_initializer(name: str) -> None:
    epsilon = {
        "gpt2": "layer_norm_epsilon", "gptj": "layer_norm_epsilon", "gptneo": "layer_norm_epsilon",
        "llama": "rms_norm_eps", "mistral": "rms_norm_eps", "qwen2": "rms_norm_eps",
    }.get(name, "layer_norm_eps")  # fmt: skip
    got = options(name, **{epsilon: 3e-4, "initializer_range": 0.3})
    assert got["layernorm_epsilon"] == 3e-4 and got["initializer_range"] == 0.3
    if name == "gpt2":
        assert got["residual_init_std"] == 0.3 / math.sqrt(2 * LAYERS)
    else:
        assert got.get("residual_init_std") is None


@pytest.mark.parametrize("name", NAMES)
def test_activations(name: str) -> None:
    field = "activation_function" if name in ("gpt2", "gptj", "gptneo") else "hidden_act"
    known = {"gelu": "gelu", "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new"}
    known |= {"gelu_fast": "gelu_new", "gelu_python": "gelu", "relu": "relu"}
    if name in LLAMAS:
        known |= {"silu": "silu", "swish": "silu"}
    for theirs, ours in known.items():
        assert options(name, **{field: theirs})["activation"] == ours
    declined = ["quick_gelu", "tanh", "mish", *([] if name in LLAMAS else ["silu"])]
    for value in declined:
        text = reason(name, edited(name, **{field: value}))
        assert field in text and repr(value) in text and "gelu_new" in text
    config = hf.family(name).config()
    config.__dict__[field] = torch.nn.functional.gelu  # newer releases refuse it themselves
    assert field in reason(name, config)


@pytest.mark.parametrize("name", [*GPTS, *LLAMAS])
def test_tied_heads(name: str) -> None:
    for tied in (True, False):
        assert options(name, tie_word_embeddings=tied)["tie_word_embedding"] is tied
    default = hf.family(name).config().tie_word_embeddings
    assert default is (name in ("gpt2", "gptneo"))
    assert options(name).get("lm_head_bias", False) is (name == "gptj")


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


def test_gpt2_scaling() -> None:
    for value in (True, False):
        assert options("gpt2", scale_attn_weights=value)["scale_attention_scores"] is value
        got = options("gpt2", scale_attn_by_inverse_layer_idx=value)
        assert got["scale_attn_by_layer_idx"] is value
        got = options("gpt2", reorder_and_upcast_attn=value)
        assert got["attention_in_fp32"] is value


def test_gpt2_cross_attention() -> None:
    assert options("gpt2")["add_cross_attention"] is False
    assert options("gpt2", add_cross_attention=True)["add_cross_attention"] is True


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


def test_gptj_structure() -> None:
    got = options("gptj")
    assert got["parallel_attn_output"] and got["single_pre_layernorm"]
    assert got["attention_in_fp32"] and not got["use_position_embedding"]
    assert not got["use_qkv_bias"] and not got["use_attn_dense_bias"]
    assert got.get("use_mlp_bias", True) and got.get("scale_attention_scores", True)


# ---- GPT-Neo --------------------------------------------------------------------------------


def test_gptneo_windows() -> None:
    assert options("gptneo")["window_size"] == [None, 3, None]
    got = options("gptneo", attention_types=[[["local"], 2], [["global"], 1]], window_size=5)
    assert got["window_size"] == [5, 5, None]
    assert options("gptneo", "layer", 1)["window_size"] == 3
    assert options("gptneo", "layer", 2)["window_size"] is None
    text = reason("gptneo", edited("gptneo", attention_layers=["global", "sparse", "local"]))
    assert "attention_layers" in text and "sparse" in text


def test_gptneo_structure() -> None:
    got = options("gptneo")
    assert not got["scale_attention_scores"] and got["attention_in_fp32"]
    assert not got["use_qkv_bias"] and got.get("use_attn_dense_bias", True)
    assert not got.get("parallel_attn_output", False)


# ---- GPT-NeoX -------------------------------------------------------------------------------


def test_gptneox_rotation() -> None:
    got = options("gptneox", rotary_pct=1.0, rotary_emb_base=500)
    assert got["rotary_dim"] == HIDDEN // HEADS and got["rotary_base"] == 500.0
    assert not got.get("rotary_interleaved", False)
    assert options("gptneox", rotary_pct=0.4)["rotary_dim"] == 2
    assert options("gptneox", rotary_pct=0.0)["rotary_dim"] is None
    declined = options("gptneox", rotary_pct=0.5)
    assert isinstance(declined, Declined) and "3 of 6 channels" in declined.reason


def test_gptneox_residuals() -> None:
    for value in (True, False):
        got = options("gptneox", use_parallel_residual=value)
        assert got["parallel_attn_output"] is value
        assert not got.get("single_pre_layernorm", False)


def test_gptneox_structure() -> None:
    got = options("gptneox")
    assert got["fused_qkv"] and not got["use_position_embedding"]
    assert got.get("use_qkv_bias", True) and not got.get("lm_head_bias", False)


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


@pytest.mark.parametrize("name", ["gptneox", *LLAMAS])
def test_scaled_rotation_is_declined(name: str) -> None:
    config = hf.family(name).config()
    if not new_fields(name):
        config.rope_scaling = {"type": "linear", "factor": 2.0}  # which that release ignores
        hook = registration(name).init_hook
        assert hook is not None and not isinstance(hook(config), Declined)
        return
    assert config.rope_parameters["rope_type"] == "default"
    for kind in ("linear", "dynamic", "yarn", "llama3"):
        config.rope_parameters = {**config.rope_parameters, "rope_type": kind, "factor": 2.0}
        text = reason(name, config)
        assert "rope_parameters" in text and kind in text and "'default'" in text


def test_scaled_rotation_of_releases_between_is_declined() -> None:
    class Config:
        """As of releases that have ``rope_scaling``."""

        def __init__(self, rope_theta: float, rope_scaling: Any) -> None:
            self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
            self.hidden_size, self.num_attention_heads = HIDDEN, HEADS

    from smp.nn.huggingface.rotary import rotary_of

    plain = rotary_of(Config(500.0, None))
    assert (plain.dim, plain.base) == (HIDDEN // HEADS, 500.0)
    assert rotary_of(Config(500.0, {"type": "default"})) == plain
    with pytest.raises(smp.nn.Unsupported, match="rope_scaling.*linear"):
        rotary_of(Config(500.0, {"type": "linear", "factor": 2.0}))


# ---- Llama, Mistral, Qwen2 --------------------------------------------------------------------


@pytest.mark.parametrize("name", LLAMAS)
def test_llama_structure(name: str) -> None:
    got = options(name)
    assert got["norm"] == "rmsnorm" and got["gated_mlp"] and not got["use_position_embedding"]
    assert got["activation"] == "silu" and got["rotary_dim"] == HIDDEN // HEADS
    assert not got.get("rotary_interleaved", False) and not got.get("attention_in_fp32", False)
    expected = (name == "qwen2", False, False)
    assert (got["use_qkv_bias"], got["use_attn_dense_bias"], got["use_mlp_bias"]) == expected


@pytest.mark.parametrize("name", LLAMAS)
def test_llama_heads(name: str) -> None:
    if not new_fields(name):
        # That release has as many heads of keys as of queries, whatever a configuration says.
        assert options(name, num_key_value_heads=2, head_dim=8)["num_key_value_heads"] == HEADS
        assert options(name, head_dim=8)["attention_head_size"] == HIDDEN // HEADS
        return
    assert options(name)["num_key_value_heads"] == 2
    assert options(name, num_key_value_heads=1)["num_key_value_heads"] == 1
    if name != "mistral":
        assert options(name, num_key_value_heads=None)["num_key_value_heads"] == HEADS
    got = options(name, head_dim=8)
    assert got["attention_head_size"] == 8 and got["rotary_dim"] == 8


@pytest.mark.parametrize("name", LLAMAS)
def test_llama_rotary_base(name: str) -> None:
    if not new_fields(name):
        assert options(name, rope_theta=500.0)["rotary_base"] == 10000.0
        return
    got = options(name, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    assert got["rotary_base"] == 500.0
    assert options(name, rope_theta=300.0)["rotary_base"] == 300.0


def test_llama_biases() -> None:
    expected = new_fields("llama")
    got = options("llama", attention_bias=True)
    assert got["use_qkv_bias"] is expected and got["use_attn_dense_bias"] is expected
    assert got["use_mlp_bias"] is False
    assert options("llama", mlp_bias=True)["use_mlp_bias"] is expected


def test_mistral_window() -> None:
    assert options("mistral", sliding_window=5)["window_size"] == 5
    assert options("mistral", sliding_window=None)["window_size"] is None
    assert options("mistral", "layer", 1, sliding_window=5)["window_size"] == 5


def test_qwen2_windows() -> None:
    assert options("qwen2", sliding_window=5)["window_size"] == [None] * LAYERS
    got = options("qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1)
    assert got["window_size"] == [None, 5, 5]
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    got = options("qwen2", use_sliding_window=True, sliding_window=4, layer_types=kinds)
    assert got["window_size"] == [4, None, 4]
    config = hf.family("qwen2").config()
    config.__dict__["layer_types"] = ["full_attention", "linear_attention", "full_attention"]
    assert "linear_attention" in reason("qwen2", config)


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


# ---- kinds and registration ------------------------------------------------------------------


@pytest.mark.parametrize("name", [*GPTS, *LLAMAS])
def test_a_base_model_is_the_same_without_a_head(name: str) -> None:
    head, base = options(name), options(name, "base")
    assert base.pop("add_lm_head") is False
    assert base == {
        key: value
        for key, value in head.items()
        if key not in ("tie_word_embedding", "lm_head_bias")
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_the_same_without_the_rest(name: str) -> None:
    takes = inspect.signature(registration(name, "layer").module_cls.__init__).parameters
    number = 0 if {"layer_idx", "layer_id"} & set(takes) else None
    whole, layer = options(name), options(name, "layer", number)
    assert layer.pop("layer_idx") == number
    windows = whole.get("window_size")
    if isinstance(windows, list):
        layer.pop("window_size")
    assert layer == {key: whole[key] for key in layer}
    assert {"hidden_size", "activation", "layernorm_epsilon"} <= set(layer)
    assert not {"vocab_size", "num_layers", "tie_word_embedding"} & set(layer)


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_is_registered(name: str) -> None:
    spec = hf.family(name).translators.FAMILY
    distributed = {
        "head": smp.nn.DistributedTransformerLMHead,
        "base": smp.nn.DistributedTransformerLMHead,
        "stack": smp.nn.DistributedTransformer,
        "layer": smp.nn.DistributedTransformerLayer,
    }
    assert set(spec.classes) == (
        {"stack", "layer"} if name in ENCODERS else {"head", "base", "layer"}
    )
    for kind in spec.classes:
        found = registration(name, kind)
        assert found.dist_module is distributed[kind] and found.family == spec.names.family
        assert found.translators is not None and found.adapter is not None


def test_arguments_without_a_configuration_are_an_internal_error() -> None:
    hook = registration("gpt2", "layer").init_hook
    assert hook is not None
    with pytest.raises(RuntimeError, match="no configuration"):
        hook(None)


def test_registering_again_keeps_what_users_registered() -> None:
    found = registration("gpt2", "base")
    own = Registration(found.module_cls, nn.Module, arguments_of=found.arguments_of)
    registry.register(own)
    try:
        huggingface.register_available()
        assert registration("gpt2", "base") is own
    finally:
        registry.register(found)


def test_half_imported_modules_are_left_alone() -> None:
    empty = types.ModuleType("transformers.modeling_utils")
    huggingface.register_available({"transformers.modeling_utils": empty})
    before = set(registry._registrations)

    class PreTrainedModel(nn.Module):
        pass

    empty.PreTrainedModel = PreTrainedModel  # type: ignore[attr-defined]
    modeling = types.ModuleType("transformers.models.gpt2.modeling_gpt2")
    modules = {empty.__name__: empty, modeling.__name__: modeling, "transformers.models.x": None}
    huggingface.register_available(modules)
    assert set(registry._registrations) == before


IMPORTS = """
import sys
import smp, smp.nn.huggingface
from smp.nn.huggingface import gpt2, register_available
register_available()
with smp.tensor_parallelism():
    pass
gpt2.translate_hf_state_dict_to_smdistributed_gpt2({})
assert not [name for name in sys.modules if name.split(".")[0] == "transformers"]
from smp.tensor_parallel import registry
import transformers.models.gpt2.modeling_gpt2 as modeling
assert modeling.GPT2LMHeadModel not in registry._registrations
register_available()
assert modeling.GPT2LMHeadModel in registry._registrations
assert "transformers.models.llama.modeling_llama" not in sys.modules
"""


def test_transformers_is_never_imported_by_us() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_all_families_have_names_of_their_own() -> None:
    assert len({family.names.family for family in REGISTERED}) == len(REGISTERED) == 9
    assert {family.modeling.rpartition("_")[2] for family in REGISTERED} >= {"gpt2", "llama"}


# ---- which weights are taken over ----------------------------------------------------------------


def test_models_from_pretrained_are_known(tmp_path: Any) -> None:
    import transformers

    model: Any = hf.family("gpt2").build()
    huggingface.register_available()
    assert not smp.nn.huggingface.was_pretrained(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert smp.nn.huggingface.was_pretrained(loaded)
    assert smp.nn.huggingface.was_pretrained(loaded.transformer.h[1])
    loaded, _ = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert smp.nn.huggingface.was_pretrained(loaded)
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)


def test_weights_of_models_that_nobody_initialised_are_not_taken_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    import transformers

    family = hf.family("gpt2")
    spec = registration("gpt2")
    assert spec.was_initialised is not None
    model: Any = family.build()
    assert spec.was_initialised(model)
    model.save_pretrained(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(transformers.PreTrainedModel, "init_weights", lambda self: None)
        assert not spec.was_initialised(model)
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
        assert spec.was_initialised(loaded)
        smp.set_tensor_parallelism(model)
        torch.manual_seed(1)
        new, _ = replace_marked(model)
    weight = new.transformer.seq_layers[0].output.dense1.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    residual = new.transformer.seq_layers[0].output.dense2.weight
    assert residual.std().item() == pytest.approx(0.02 / math.sqrt(2 * LAYERS), rel=0.1)
    assert new.transformer.seq_layers[0].output.dense1.bias.abs().max() == 0.0


def test_watching_twice_wraps_once() -> None:
    import transformers

    pretrained.watch(transformers.PreTrainedModel)
    before = vars(transformers.PreTrainedModel)["from_pretrained"]
    pretrained.watch(transformers.PreTrainedModel)
    assert vars(transformers.PreTrainedModel)["from_pretrained"] is before


@pytest.mark.parametrize("name", NAMES)
def test_families_of_this_file_are_all_there(name: str) -> None:
    assert name in FAMILIES
