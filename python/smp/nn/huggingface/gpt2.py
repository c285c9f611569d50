"""GPT-2."""

from __future__ import annotations

from typing import Any

from smp.nn.huggingface import buffers
from smp.nn.huggingface.buffers import Facts
from smp.nn.huggingface.translation import Names, layer_translators, translators

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

BASE_TRANSLATORS = translators(NAMES, prefer="base")
LAYER_TRANSLATORS = layer_translators(NAMES)
translate_state_dict_to_hf_gpt2, translate_hf_state_dict_to_smdistributed_gpt2 = translators(NAMES)
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2


def note(config: Any) -> None:
    """Remembers what the buffers of a model with this configuration follow from."""
    facts = Facts(config.n_positions, (None,) * config.n_layer)
    buffers.note(NAMES.family, (config.vocab_size, config.n_embd), facts)
