"""BERT: the encoder is distributed; embeddings and heads stay as they are."""

from __future__ import annotations

from typing import Any

from smp.nn.huggingface.family import Family, Options
from smp.nn.huggingface.fields import activation_of, refuse
from smp.nn.huggingface.translation import Names, translators

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

translate_state_dict_to_hf_bert, translate_hf_state_dict_to_smdistributed_bert = translators(NAMES)
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_bert
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_bert


def note(config: Any) -> None:
    """Stores nothing: encoders keep values other than parameters in their embeddings."""


def options(config: Any) -> Options:
    """Returns the arguments of the distributed encoder.

    Raises:
        Unsupported: no distributed encoder does this configuration.
    """
    refuse(config, "position_embedding_type", "absolute", "'absolute'")
    refuse(config, "is_decoder", False, "False")
    refuse(config, "add_cross_attention", False, "False")
    refuse(config, "chunk_size_feed_forward", 0, "0")
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": float(config.attention_probs_dropout_prob),
        "hidden_dropout_prob": float(config.hidden_dropout_prob),
        "activation": activation_of(config, "hidden_act"),
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": False,
        "post_layernorm": True,
    }


FAMILY = Family(
    names=NAMES,
    modeling="transformers.models.bert.modeling_bert",
    classes={"stack": "BertEncoder", "layer": "BertLayer"},
    outputs={"stack": "BaseModelOutputWithPastAndCrossAttentions"},
    options=options,
    note=note,
)
