"""Qwen2: the names of Llama."""

from __future__ import annotations

import dataclasses

from smp.nn.huggingface import llama
from smp.nn.huggingface.translation import layer_translators, translators

NAMES = dataclasses.replace(llama.NAMES, family="qwen2")

BASE_TRANSLATORS = translators(NAMES, prefer="base")
note = llama.note
LAYER_TRANSLATORS = layer_translators(NAMES)
translate_state_dict_to_hf_qwen2, translate_hf_state_dict_to_smdistributed_qwen2 = translators(
    NAMES
)
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_qwen2
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_qwen2
