"""Llama."""

from __future__ import annotations

from typing import Any

from smp.nn.huggingface import buffers
from smp.nn.huggingface.buffers import Facts
from smp.nn.huggingface.family import Family, Options, decoder_classes
from smp.nn.huggingface.fields import activation_of, field
from smp.nn.huggingface.rotary import head_size_of, rotary_of
from smp.nn.huggingface.translation import Names, translators

NAMES = Names(
    family="llama",
    base="model.",
    layers="layers",
    outer={"embed_tokens": "word_embedding", "norm": "layernorm"},
    inner={
        "input_layernorm": "attention.pre_layernorm",
        "self_attn.q_proj": "attention.query",
        "self_attn.k_proj": "attention.key",
        "self_attn.v_proj": "attention.value",
        "self_attn.o_proj": "attention.dense",
        "post_attention_layernorm": "output.pre_layernorm",
        "mlp.gate_proj": "output.gate",
        "mlp.up_proj": "output.dense1",
        "mlp.down_proj": "output.dense2",
    },
    anchor=("self_attn.q_proj.weight", "input_layernorm.weight", "mlp.gate_proj.weight"),
    ours_has=("attention.query.weight", "attention.pre_layernorm.weight", "output.gate.weight"),
    ignored=frozenset({"self_attn.rotary_emb.inv_freq"}),
)

translate_state_dict_to_hf_llama, translate_hf_state_dict_to_smdistributed_llama = translators(
    NAMES
)
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_llama
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_llama


def note(config: Any) -> None:
    """Stores the values of this configuration that determine buffers."""
    rotary = rotary_of(config)
    facts = Facts(
        config.max_position_embeddings,
        (None,) * config.num_hidden_layers,
        rotary.dim,
        rotary.base,
    )
    buffers.note(NAMES.family, (config.vocab_size, config.hidden_size), facts)


def base_options(config: Any) -> Options:
    """Returns the arguments that Llama, Mistral and Qwen2 have in common.

    Raises:
        Unsupported: no distributed model does this configuration.
    """
    heads = config.num_attention_heads
    rotary = rotary_of(config)
    kv_heads = field(config, "num_key_value_heads", None)
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "attention_head_size": head_size_of(config),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "num_positions": config.max_position_embeddings,
        "attention_dropout_prob": float(field(config, "attention_dropout", 0.0) or 0.0),
        "hidden_dropout_prob": 0.0,
        "activation": activation_of(config, "hidden_act", silu=True),
        "layernorm_epsilon": config.rms_norm_eps,
        "causal_mask_size": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "rotary_dim": rotary.dim,
        "rotary_base": rotary.base,
        "norm": "rmsnorm",
        "gated_mlp": True,
        "use_position_embedding": False,
        "tie_word_embedding": config.tie_word_embeddings,
    }


def options(config: Any) -> Options:
    """Returns the arguments of the distributed model.

    Raises:
        Unsupported: no distributed model does this configuration.
    """
    has_bias = bool(field(config, "attention_bias", False))
    return {
        **base_options(config),
        "use_qkv_bias": has_bias,
        "use_attn_dense_bias": has_bias,
        "use_mlp_bias": bool(field(config, "mlp_bias", False)),
    }


FAMILY = Family(
    names=NAMES,
    modeling="transformers.models.llama.modeling_llama",
    classes=decoder_classes("Llama", "ForCausalLM", "DecoderLayer"),
    outputs={"head": "CausalLMOutputWithPast", "base": "BaseModelOutputWithPast"},
    options=options,
    note=note,
    rotates=True,
)
