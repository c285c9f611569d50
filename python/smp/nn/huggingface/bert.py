"""BERT: the encoder is distributed, embeddings and heads stay what they are."""

from __future__ import annotations

from typing import Any

from smp.nn.huggingface.translation import Names, layer_translators, translators

NAMES = Names(
    family="bert",
    base="",
    layers="layer",
    outer={},
    inner={
        "attention.self.query": "attention.query",
        "attention.self.key": "attention.key",
        "attention.self.value": "attention.value",
        "attention.output.dense": "attention.dense",
        "attention.output.LayerNorm": "attention.layernorm",
        "intermediate.dense": "output.dense1",
        "output.dense": "output.dense2",
        "output.LayerNorm": "output.layernorm",
    },
    anchor=(
        "attention.self.query.weight",
        "attention.output.LayerNorm.weight",
        "intermediate.dense.weight",
    ),
    ours_has=("attention.query.weight", "attention.layernorm.weight", "output.layernorm.weight"),
    ours_lacks=("attention.pre_layernorm.weight",),
    tied={
        "cls.predictions.decoder.weight": "{model}embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
)

LAYER_TRANSLATORS = layer_translators(NAMES)
translate_state_dict_to_hf_bert, translate_hf_state_dict_to_smdistributed_bert = translators(NAMES)
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_bert
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_bert


def note(config: Any) -> None:
    """Nothing to remember: what encoders keep beside parameters stays in their embeddings."""
