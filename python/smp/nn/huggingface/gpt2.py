"""GPT-2."""

from __future__ import annotations

import math
from typing import Any

from smp.nn.huggingface import buffers
from smp.nn.huggingface.buffers import Facts
from smp.nn.huggingface.family import Family, Options, decoder_classes
from smp.nn.huggingface.fields import activation_of, field
from smp.nn.huggingface.translation import Names, translators

NAMES = Names(
    family="gpt2",
    base="transformer.",
    layers="h",
    outer={"wte": "word_embedding", "wpe": "position_embedding", "ln_f": "layernorm"},
    inner={
        "ln_1": "attention.pre_layernorm",
        "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
        "attn.c_proj": "attention.dense",
        "ln_cross_attn": "cross_attention.pre_layernorm",
        "crossattention.q_attn": "cross_attention.query",
        "crossattention.c_attn": ("cross_attention.key", "cross_attention.value"),
        "crossattention.c_proj": "cross_attention.dense",
        "ln_2": "output.pre_layernorm",
        "mlp.c_fc": "output.dense1",
        "mlp.c_proj": "output.dense2",
    },
    anchor=("attn.c_attn.weight", "ln_1.weight", "mlp.c_fc.weight"),
    ours_has=("attention.query.weight", "attention.query.bias", "output.pre_layernorm.weight"),
    ours_lacks=("output.gate.weight", "attention.layernorm.weight"),
    transposed=frozenset(
        {
            "attn.c_attn",
            "attn.c_proj",
            "crossattention.q_attn",
            "crossattention.c_attn",
            "crossattention.c_proj",
            "mlp.c_fc",
            "mlp.c_proj",
        }
    ),
    has_tied_head=True,
    ignored=frozenset(
        {
            "attn.bias",
            "attn.masked_bias",
            "crossattention.bias",
            "crossattention.masked_bias",
        }
    ),
)

translate_state_dict_to_hf_gpt2, translate_hf_state_dict_to_smdistributed_gpt2 = translators(NAMES)
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2


def note(config: Any) -> None:
    """Stores the values of this configuration that determine buffers."""
    facts = Facts(config.n_positions, (None,) * config.n_layer)
    buffers.note(NAMES.family, (config.vocab_size, config.n_embd), facts)


def options(config: Any) -> Options:
    """Returns the arguments of the distributed model.

    Raises:
        Unsupported: no distributed model does this configuration.
    """
    hidden = config.n_embd
    return {
        "num_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "attention_head_size": hidden // config.n_head,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden if config.n_inner is None else config.n_inner,
        "vocab_size": config.vocab_size,
        "num_positions": config.n_positions,
        "attention_dropout_prob": float(config.attn_pdrop),
        "hidden_dropout_prob": float(config.resid_pdrop),
        "embedding_dropout_prob": float(config.embd_pdrop),
        "activation": activation_of(config, "activation_function"),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "causal_mask_size": config.n_positions,
        "add_cross_attention": bool(getattr(config, "add_cross_attention", False)),
        "initializer_range": config.initializer_range,
        "residual_init_std": config.initializer_range / math.sqrt(2 * config.n_layer),
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "scale_attention_scores": config.scale_attn_weights,
        "scale_attn_by_layer_idx": field(config, "scale_attn_by_inverse_layer_idx", False),
        "attention_in_fp32": field(config, "reorder_and_upcast_attn", False),
        "tie_word_embedding": config.tie_word_embeddings,
        "token_types_are_words": True,
    }


FAMILY = Family(
    names=NAMES,
    modeling="transformers.models.gpt2.modeling_gpt2",
    classes=decoder_classes("GPT2", "LMHeadModel", "Block"),
    outputs={
        "head": "CausalLMOutputWithCrossAttentions",
        "base": "BaseModelOutputWithPastAndCrossAttentions",
    },
    options=options,
    note=note,
)
