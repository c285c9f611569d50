"""GPT-NeoX."""

from __future__ import annotations

from typing import Any

from smp.nn.huggingface import buffers
from smp.nn.huggingface.buffers import Facts
from smp.nn.huggingface.family import Family, Options, decoder_classes
from smp.nn.huggingface.fields import activation_of, field
from smp.nn.huggingface.rotary import rotary_of
from smp.nn.huggingface.translation import Names, translators
from smp.tensor_parallel.registry import Unsupported

# Query, key and value of a head are together and stay so: separating them takes the number of
# heads, which is in no state dict.
NAMES = Names(
    family="gpt_neox",
    base="gpt_neox.",
    layers="layers",
    outer={"embed_in": "word_embedding", "final_layer_norm": "layernorm"},
    inner={
        "input_layernorm": "attention.pre_layernorm",
        "attention.query_key_value": "attention.query_key_value",
        "attention.dense": "attention.dense",
        "post_attention_layernorm": "output.pre_layernorm",
        "mlp.dense_h_to_4h": "output.dense1",
        "mlp.dense_4h_to_h": "output.dense2",
    },
    anchor=(
        "attention.query_key_value.weight",
        "input_layernorm.weight",
        "mlp.dense_h_to_4h.weight",
    ),
    ours_has=("attention.query_key_value.weight", "output.pre_layernorm.weight"),
    ignored=frozenset({"attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"}),
)

translate_state_dict_to_hf_gptneox, translate_hf_state_dict_to_smdistributed_gptneox = translators(
    NAMES
)
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneox
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneox


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


def options(config: Any) -> Options:
    """Returns the arguments of the distributed model.

    Raises:
        Unsupported: no distributed model does this configuration.
    """
    if field(config, "attention_bias", True) is not True:
        raise Unsupported("attention_bias is False; supported is True")
    rotary = rotary_of(config)
    dropout = float(field(config, "hidden_dropout", 0.0))
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "num_positions": config.max_position_embeddings,
        "attention_dropout_prob": float(field(config, "attention_dropout", 0.0)),
        "hidden_dropout_prob": dropout,
        "embedding_dropout_prob": dropout,
        "activation": activation_of(config, "hidden_act"),
        "layernorm_epsilon": config.layer_norm_eps,
        "causal_mask_size": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "rotary_dim": rotary.dim or None,
        "rotary_base": rotary.base,
        "fused_qkv": True,
        "parallel_attn_output": config.use_parallel_residual,
        "use_position_embedding": False,
        "tie_word_embedding": config.tie_word_embeddings,
    }


FAMILY = Family(
    names=NAMES,
    modeling="transformers.models.gpt_neox.modeling_gpt_neox",
    classes=decoder_classes("GPTNeoX", "ForCausalLM", "Layer"),
    outputs={"head": "CausalLMOutputWithPast", "base": "BaseModelOutputWithPast"},
    options=options,
    note=note,
    rotates=True,
)
