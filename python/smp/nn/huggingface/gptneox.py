"""GPT-NeoX."""

from __future__ import annotations

from typing import Any

from smp.nn.huggingface import buffers
from smp.nn.huggingface.buffers import Facts
from smp.nn.huggingface.rotary import rotary_of
from smp.nn.huggingface.translation import Names, layer_translators, translators

# Query, key and value of a head stand together and stay so: to part them takes the number of
# heads, which no state dict tells.
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

BASE_TRANSLATORS = translators(NAMES, prefer="base")
LAYER_TRANSLATORS = layer_translators(NAMES)
translate_state_dict_to_hf_gptneox, translate_hf_state_dict_to_smdistributed_gptneox = translators(
    NAMES
)
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneox
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneox


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
