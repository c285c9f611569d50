"""Llama."""

from __future__ import annotations

from typing import Any

from smp.nn.huggingface import buffers
from smp.nn.huggingface.buffers import Facts
from smp.nn.huggingface.rotary import rotary_of
from smp.nn.huggingface.translation import Names, layer_translators, translators

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

BASE_TRANSLATORS = translators(NAMES, prefer="base")
LAYER_TRANSLATORS = layer_translators(NAMES)
translate_state_dict_to_hf_llama, translate_hf_state_dict_to_smdistributed_llama = translators(
    NAMES
)
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_llama
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_llama


def note(config: Any) -> None:
    """Remembers what the buffers of a model with this configuration follow from."""
    rotary = rotary_of(config)
    facts = Facts(
        config.max_position_embeddings,
        (None,) * config.num_hidden_layers,
        rotary.dim,
        rotary.base,
    )
    buffers.note(NAMES.family, (config.vocab_size, config.hidden_size), facts)
