"""Mistral: the names of Llama."""

from __future__ import annotations

import dataclasses
from typing import Any

from smp.nn.huggingface import llama
from smp.nn.huggingface.family import Family, Options, decoder_classes
from smp.nn.huggingface.translation import translators

NAMES = dataclasses.replace(llama.NAMES, family="mistral")

translate_state_dict_to_hf_mistral, translate_hf_state_dict_to_smdistributed_mistral = translators(
    NAMES
)
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_mistral
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_mistral


def options(config: Any) -> Options:
    """Returns the arguments of the distributed model.

    Raises:
        Unsupported: no distributed model does this configuration.
    """
    return {
        **llama.base_options(config),
        "window_size": config.sliding_window,
        "use_qkv_bias": False,
        "use_attn_dense_bias": False,
        "use_mlp_bias": False,
    }


FAMILY = Family(
    names=NAMES,
    modeling="transformers.models.mistral.modeling_mistral",
    classes=decoder_classes("Mistral", "ForCausalLM", "DecoderLayer"),
    outputs={"head": "CausalLMOutputWithPast", "base": "BaseModelOutputWithPast"},
    options=options,
    note=llama.note,
    rotates=True,
)
