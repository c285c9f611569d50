"""GPT-Neo."""

from __future__ import annotations

from typing import Any

from smp.nn.huggingface import buffers
from smp.nn.huggingface.buffers import Facts
from smp.nn.huggingface.family import Family, Options, decoder_classes
from smp.nn.huggingface.fields import activation_of
from smp.nn.huggingface.translation import Names, translators
from smp.tensor_parallel.registry import Unsupported

NAMES = Names(
    family="gpt_neo",
    base="transformer.",
    layers="h",
    outer={"wte": "word_embedding", "wpe": "position_embedding", "ln_f": "layernorm"},
    inner={
        "ln_1": "attention.pre_layernorm",
        "attn.attention.q_proj": "attention.query",
        "attn.attention.k_proj": "attention.key",
        "attn.attention.v_proj": "attention.value",
        "attn.attention.out_proj": "attention.dense",
        "ln_2": "output.pre_layernorm",
        "mlp.c_fc": "output.dense1",
        "mlp.c_proj": "output.dense2",
    },
    anchor=("attn.attention.q_proj.weight", "ln_1.weight", "mlp.c_fc.weight"),
    ours_has=("attention.query.weight", "attention.dense.bias", "output.pre_layernorm.weight"),
    ours_lacks=("attention.query.bias", "output.gate.weight", "attention.layernorm.weight"),
    has_tied_head=True,
    ignored=frozenset({"attn.attention.bias", "attn.attention.masked_bias"}),
)

translate_state_dict_to_hf_gptneo, translate_hf_state_dict_to_smdistributed_gptneo = translators(
    NAMES
)
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo


def note(config: Any) -> None:
    """Stores the values of this configuration that determine buffers."""
    windows = tuple(
        config.window_size if kind == "local" else None for kind in config.attention_layers
    )
    facts = Facts(config.max_position_embeddings, windows)
    buffers.note(NAMES.family, (config.vocab_size, config.hidden_size), facts)


def options(config: Any) -> Options:
    """Returns the arguments of the distributed model.

    Raises:
        Unsupported: no distributed model does this configuration.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    kinds = config.attention_layers
    if not set(kinds) <= {"global", "local"}:
        raise Unsupported(f"attention_layers is {kinds!r}; supported are 'global' and 'local'")
    return {
        "num_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "attention_head_size": hidden // config.num_heads,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden if inner is None else inner,
        "vocab_size": config.vocab_size,
        "num_positions": config.max_position_embeddings,
        "attention_dropout_prob": float(config.attention_dropout),
        "hidden_dropout_prob": float(config.resid_dropout),
        "embedding_dropout_prob": float(config.embed_dropout),
        "activation": activation_of(config, "activation_function"),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "causal_mask_size": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "window_size": [config.window_size if kind == "local" else None for kind in kinds],
        "scale_attention_scores": False,
        "attention_in_fp32": True,
        "use_qkv_bias": False,
        "tie_word_embedding": config.tie_word_embeddings,
        "token_types_are_words": True,
    }


FAMILY = Family(
    names=NAMES,
    modeling="transformers.models.gpt_neo.modeling_gpt_neo",
    classes=decoder_classes("GPTNeo", "ForCausalLM", "Block"),
    outputs={"head": "CausalLMOutputWithPast", "base": "BaseModelOutputWithPast"},
    options=options,
    note=note,
    layers_return_tuples=True,
)
