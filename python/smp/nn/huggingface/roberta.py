"""RoBERTa: BERT with another head."""

from __future__ import annotations

import dataclasses

from smp.nn.huggingface import bert
from smp.nn.huggingface.family import Family
from smp.nn.huggingface.translation import translators

NAMES = dataclasses.replace(
    bert.NAMES,
    family="roberta",
    tied={
        "lm_head.decoder.weight": "{model}embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
)

translate_state_dict_to_hf_roberta, translate_hf_state_dict_to_smdistributed_roberta = translators(
    NAMES
)
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta


FAMILY = Family(
    names=NAMES,
    modeling="transformers.models.roberta.modeling_roberta",
    classes={"stack": "RobertaEncoder", "layer": "RobertaLayer"},
    outputs={"stack": "BaseModelOutputWithPastAndCrossAttentions"},
    options=bert.options,
    note=bert.note,
)
