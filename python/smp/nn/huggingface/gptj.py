"""GPT-J."""

from __future__ import annotations

from typing import Any

from smp.nn.huggingface import buffers
from smp.nn.huggingface.buffers import Facts
from smp.nn.huggingface.translation import Names, layer_translators, translators

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

BASE_TRANSLATORS = translators(NAMES, prefer="base")
LAYER_TRANSLATORS = layer_translators(NAMES)
translate_state_dict_to_hf_gptj, translate_hf_state_dict_to_smdistributed_gptj = translators(NAMES)
translate_hf_gptj_state_dict_to_smdistributed_gptj = translate_hf_state_dict_to_smdistributed_gptj
translate_hf_gptj_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj


def note(config: Any) -> None:
    """Remembers what the buffers of a model with this configuration follow from."""
    facts = Facts(config.n_positions, (None,) * config.n_layer)
    buffers.note(NAMES.family, (config.vocab_size, config.n_embd), facts)
