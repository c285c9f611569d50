"""RoBERTa: as BERT with another head."""

from __future__ import annotations

import dataclasses

from smp.nn.huggingface import bert
from smp.nn.huggingface.translation import layer_translators, translators

NAMES = dataclasses.replace(
    bert.NAMES,
    family="roberta",
    tied={
        "lm_head.decoder.weight": "{model}embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
)

note = bert.note
LAYER_TRANSLATORS = layer_translators(NAMES)
translate_state_dict_to_hf_roberta, translate_hf_state_dict_to_smdistributed_roberta = translators(
    NAMES
)
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
