"""Arguments that constructors and calls of distributed modules accept."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import smp
from tests.reference import transformer as plain

_LM: dict[str, Any] = {
    "num_layers": 1,
    "num_attention_heads": 2,
    "attention_head_size": 4,
    "hidden_size": 8,
    "intermediate_size": 16,
    "vocab_size": 11,
    "num_positions": 8,
}


pytestmark = pytest.mark.usefixtures("running")


# ---- signatures ------------------------------------------------------------------------

_COMMON: dict[str, Any] = {
    "attention_dropout_prob": 0.1,
    "hidden_dropout_prob": 0.1,
    "activation": "gelu",
    "layernorm_epsilon": 1e-5,
}
_SIZES = {"num_attention_heads": 32, "attention_head_size": 32, "hidden_size": 1024}
_INITIAL: dict[str, Any] = {"initializer_range": 0.02, "use_normal_initialization": False}
_NORMS = {"pre_layernorm": False, "post_layernorm": True}
_MASKS: dict[str, Any] = {"causal_mask_size": None, "add_cross_attention": False}
_NO_MLP = {k: v for k, v in _COMMON.items() if k != "activation"}
_NO_ATTENTION = {k: v for k, v in _COMMON.items() if k != "attention_dropout_prob"}
_REQUIRED = inspect.Parameter.empty

DOCUMENTED: dict[str, dict[str, Any]] = {
    "DistributedLinear": {"in_features": _REQUIRED, "out_features": _REQUIRED, "bias": True},
    "DistributedEmbedding": {
        "num_embeddings": _REQUIRED,
        "embedding_dim": _REQUIRED,
        "padding_idx": None,
        "max_norm": None,
        "norm_type": 2.0,
        "scale_grad_by_freq": False,
        "sparse": False,
        "_weight": None,
        "initializer_range": 0.02,
        "_skip_allgather": False,
        "_skip_scatter_and_merge": False,
    },
    "DistributedTransformerLMHead": {
        "num_layers": 12,
        **_SIZES,
        "intermediate_size": 4096,
        "vocab_size": 30522,
        "num_positions": 1024,
        **_COMMON,
        "num_token_types": 0,
        **_MASKS,
        "add_lm_head": True,
        **_INITIAL,
        **_NORMS,
    },
    "DistributedTransformer": {
        "num_layers": 12,
        **_SIZES,
        "intermediate_size": 4096,
        **_COMMON,
        **_INITIAL,
        **_MASKS,
        **_NORMS,
    },
    "DistributedTransformerLayer": {
        **_SIZES,
        "intermediate_size": 4096,
        **_COMMON,
        **_INITIAL,
        **_MASKS,
        **_NORMS,
        "use_alibi": False,
        "alibi_bias_max": 8,
    },
    "DistributedAttentionLayer": {
        **_SIZES,
        **_NO_MLP,
        **_INITIAL,
        "cross_attention": False,
        "causal_mask_size": None,
        **_NORMS,
    },
    "DistributedTransformerOutputLayer": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        **_NO_ATTENTION,
        **_INITIAL,
        **_NORMS,
        "fp32_residual_addition": False,
    },
    "FlashAttentionLayer": {
        "attention_dropout_prob": 0.1,
        "attention_head_size": None,
        "scale_attention_scores": True,
        "scale_attn_by_layer_idx": False,
        "layer_idx": None,
        "scale": None,
        "triton_flash_attention": False,
        "use_alibi": False,
    },
    "FusedLayerNorm": {"normalized_shape": _REQUIRED, "eps": 1e-5, "elementwise_affine": True},
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_signature_begins_as_documented(name: str) -> None:
    parameters = list(inspect.signature(getattr(smp.nn, name)).parameters.values())
    documented = list(DOCUMENTED[name].items())
    assert [(p.name, p.default) for p in parameters[: len(documented)]] == documented
    for further in parameters[len(documented) :]:
        assert further.default is not _REQUIRED, f"{further.name} has no neutral default"


# ---- names ------------------------------------------------------------------------------


GELUS = {
    "gelu": ("gelu", "gelu_python"),
    "gelu_new": (
        *("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"),
    ),
}


@pytest.mark.parametrize(("ours", "name"), [(o, n) for o, names in GELUS.items() for n in names])
def test_every_name_of_a_gelu_is_taken(ours: str, name: str) -> None:
    layer = smp.nn.DistributedTransformerOutputLayer(8, 16, 0.0, name).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    results = {}
    for wanted in GELUS:
        reference = plain.Output(8, 16, activation=wanted).double()
        reference.load_state_dict(layer.state_dict())
        results[wanted] = (layer(x) - reference(x)).abs().max().item()
    assert results.pop(ours) < 1e-12 and min(results.values()) > 1e-6
    model = smp.nn.DistributedTransformerLMHead(**_LM, activation=name)
    assert model.transformer.seq_layers[0].output.activation == ours


# ---- refusals --------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("DistributedAttentionLayer", {"post_layernorm": False}, "at least one"),
    ("DistributedAttentionLayer", {"window_size": 4}, "causal_mask_size"),
    ("DistributedAttentionLayer", {"rotary_dim": 3}, "even"),
    ("DistributedAttentionLayer", {"rotary_dim": 64}, "attention_head_size"),
    ("DistributedAttentionLayer", {"query_key_layer_scaling": True}, "layer_idx"),
    ("DistributedAttentionLayer", {"scale_attn_by_layer_idx": True}, "layer_idx"),
    ("DistributedAttentionLayer", {"fused_qkv": True, "cross_attention": True}, "fused_qkv"),
    ("DistributedTransformerOutputLayer", {"activation": "swish"}, "'relu'"),
    ("DistributedTransformerOutputLayer", {"post_layernorm": False}, "at least one"),
    ("DistributedTransformerLayer", {"parallel_attn_output": True}, "post_layernorm=False"),
    ("DistributedTransformerLayer", {"single_pre_layernorm": True}, "parallel_attn_output"),
    ("DistributedTransformer", {"num_layers": 2, "window_size": [1]}, "1 entries for 2 layers"),
    ("DistributedEmbedding", {"num_embeddings": 4, "embedding_dim": 4, "sparse": True}, "sparse"),
    ("DistributedEmbedding", {"num_embeddings": 4, "embedding_dim": 4, "padding_idx": 4}, "no row"),
    (
        "DistributedEmbedding",
        {"num_embeddings": 4, "embedding_dim": 4, "_weight": torch.zeros(2, 4)},
        "whole table",
    ),
    ("FlashAttentionLayer", {}, "attention_head_size"),
    ("FlashAttentionLayer", {"attention_head_size": 8, "use_alibi": True}, "triton"),
]


@pytest.mark.parametrize(("name", "arguments", "words"), REFUSED)
def test_arguments_that_contradict_are_refused(
    name: str, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        getattr(smp.nn, name)(**arguments)


def test_calls_that_do_not_fit_are_refused() -> None:
    x = torch.randn(2, 3, 8)
    attention = smp.nn.DistributedAttentionLayer(2, 4, 8, causal_mask_size=2)
    for inputs, words in (
        (x, "tuple"),
        ((x,), "attention_mask"),
        ((x, None, None), "tuple"),
        ((x, torch.ones(2, 1, 1, 3).long()), "added to scores"),
        ((x, None), "3 positions; causal_mask_size is 2"),
    ):
        with pytest.raises(ValueError, match=words):
            attention(inputs)
    crossing = smp.nn.DistributedAttentionLayer(2, 4, 8, cross_attention=True)
    with pytest.raises(ValueError, match="cross_states is None"):
        crossing((x, None, None))
    crossed = smp.nn.DistributedTransformerLayer(2, 4, 8, 8, add_cross_attention=True)
    with pytest.raises(ValueError, match="cross_states is None; give both"):
        crossed((x, None, None, torch.zeros(2, 1, 1, 3)))
    with pytest.raises(ValueError, match="hidden_states, cross_states"):
        crossed((x, None))
    model = smp.nn.DistributedTransformerLMHead(**_LM)
    ids = torch.zeros(2, 3, dtype=torch.long)
    for inputs, words in (
        ((ids, None), "token_type_ids"),
        ((None, None, None, None, None), "input_ids"),
        ((ids, None, ids, None, None), "num_token_types"),
        ((torch.zeros(2, 9).long(), None, None, None, None), "9 positions; num_positions is 8"),
        ((ids, torch.zeros(2, 4), None, None, None), r"\[2, 4\]; expected \[2, 3\]"),
    ):
        with pytest.raises(ValueError, match=words):
            model(inputs)
    crossed = smp.nn.DistributedTransformerLMHead(**_LM, add_cross_attention=True)
    with pytest.raises(ValueError, match="cross_states is None; give both"):
        crossed((ids, None, None, None, None, torch.zeros(2, 3), None))
    with pytest.raises(ValueError, match="add_lm_head"):
        smp.nn.DistributedTransformerLMHead(**_LM, add_lm_head=False)((ids, None, None, None, ids))


def test_modules_need_an_initialized_runtime() -> None:
    smp.shutdown()
    with pytest.raises(RuntimeError, match="smp.init"):
        smp.nn.DistributedLinear(4, 4)


def test_plain_references_know_every_option() -> None:
    """Options of our layers that a reference ignores are those without effect in float64."""
    ours = set(inspect.signature(smp.nn.DistributedAttentionLayer).parameters)
    theirs = set(inspect.signature(plain.Attention).parameters)
    without_effect = {
        *("initializer_range", "use_normal_initialization", "residual_init_std"),
        *("attention_in_fp32", "query_key_layer_scaling", "fp32_residual_addition"),
        *("flash_attention", "_inside"),
    }
    assert ours - theirs == without_effect
