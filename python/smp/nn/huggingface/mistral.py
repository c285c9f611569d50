"""Mistral: the names of Llama."""

from __future__ import annotations

import dataclasses

from smp.nn.huggingface import llama
from smp.nn.huggingface.translation import layer_translators, translators

NAMES = dataclasses.replace(llama.NAMES, family="mistral")

BASE_TRANSLATORS = translators(NAMES, prefer="base")
note = llama.note
LAYER_TRANSLATORS = layer_translators(NAMES)
translate_state_dict_to_hf_mistral, translate_hf_state_dict_to_smdistributed_mistral = translators(
    NAMES
)
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_mistral
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_mistral
