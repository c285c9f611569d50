"""GPT-J."""

from __future__ import annotations

from typing import Any

from smp.nn.huggingface import buffers
from smp.nn.huggingface.buffers import Facts
from smp.nn.huggingface.family import Family, Options, decoder_classes
from smp.nn.huggingface.fields import activation_of
from smp.nn.huggingface.translation import Names, translators
from smp.tensor_parallel.registry import Unsupported

NAMES = Names(
    family="gptj",
    base="transformer.",
    layers="h",
    outer={"wte": "word_embedding", "ln_f": "layernorm"},
    inner={
        "ln_1": "attention.pre_layernorm",
        "attn.q_proj": "attention.query",
        "attn.k_proj": "attention.key",
        "attn.v_proj": "attention.value",
        "attn.out_proj": "attention.dense",
        "mlp.fc_in": "output.dense1",
        "mlp.fc_out": "output.dense2",
    },
    anchor=("attn.q_proj.weight", "ln_1.weight", "mlp.fc_in.weight"),
    ours_has=("attention.query.weight", "attention.pre_layernorm.weight", "output.dense1.weight"),
    ours_lacks=("attention.query.bias", "output.pre_layernorm.weight", "output.gate.weight"),
    ignored=frozenset({"attn.bias", "attn.masked_bias", "attn.embed_positions"}),
)

translate_state_dict_to_hf_gptj, translate_hf_state_dict_to_smdistributed_gptj = translators(NAMES)
translate_hf_gptj_state_dict_to_smdistributed_gptj = translate_hf_state_dict_to_smdistributed_gptj
translate_hf_gptj_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj


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
    head_size = hidden // config.n_head
    rotary_dim = head_size if config.rotary_dim is None else config.rotary_dim
    if rotary_dim % 2 == 1 or not 0 < rotary_dim <= head_size:
        raise Unsupported(
            f"rotary_dim is {rotary_dim}; supported are even numbers up to the size of a head, "
            f"which is {head_size}"
        )
    return {
        "num_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "attention_head_size": head_size,
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
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "rotary_dim": rotary_dim,
        "rotary_interleaved": True,
        "attention_in_fp32": True,
        "use_qkv_bias": False,
        "use_attn_dense_bias": False,
        "parallel_attn_output": True,
        "single_pre_layernorm": True,
        "use_position_embedding": False,
        "tie_word_embedding": config.tie_word_embeddings,
        "token_types_are_words": True,
        "lm_head_bias": True,
    }


FAMILY = Family(
    names=NAMES,
    modeling="transformers.models.gptj.modeling_gptj",
    classes=decoder_classes("GPTJ", "ForCausalLM", "Block"),
    outputs={"head": "CausalLMOutputWithPast", "base": "BaseModelOutputWithPast"},
    options=options,
    note=note,
    rotates=True,
    layers_return_tuples=True,
)
