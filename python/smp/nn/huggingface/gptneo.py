"""GPT-Neo."""

from __future__ import annotations

from typing import Any

from smp.nn.huggingface import buffers
from smp.nn.huggingface.buffers import Facts
from smp.nn.huggingface.translation import Names, layer_translators, translators

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

BASE_TRANSLATORS = translators(NAMES, prefer="base")
LAYER_TRANSLATORS = layer_translators(NAMES)
translate_state_dict_to_hf_gptneo, translate_hf_state_dict_to_smdistributed_gptneo = translators(
    NAMES
)
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo


def note(config: Any) -> None:
    """Remembers what the buffers of a model with this configuration follow from."""
    windows = tuple(
        config.window_size if kind == "local" else None for kind in config.attention_layers
    )
    facts = Facts(config.max_position_embeddings, windows)
    buffers.note(NAMES.family, (config.vocab_size, config.hidden_size), facts)
