"""Qwen2: the names of Llama."""

from __future__ import annotations

import dataclasses
from typing import Any

from smp.nn.huggingface import llama
from smp.nn.huggingface.family import Family, Options, decoder_classes
from smp.nn.huggingface.translation import translators
from smp.tensor_parallel.registry import Unsupported

NAMES = dataclasses.replace(llama.NAMES, family="qwen2")

translate_state_dict_to_hf_qwen2, translate_hf_state_dict_to_smdistributed_qwen2 = translators(
    NAMES
)
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_qwen2
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_qwen2


def options(config: Any) -> Options:
    """Returns the arguments of the distributed model.

    Raises:
        Unsupported: no distributed model does this configuration.
    """
    return {
        **llama.base_options(config),
        "window_size": windows_of(config),
        "use_qkv_bias": True,
        "use_attn_dense_bias": False,
        "use_mlp_bias": False,
    }


def windows_of(config: Any) -> list[int | None]:
    """Returns the number of positions that each layer sees, or None for all earlier ones.

    Raises:
        Unsupported: a layer is of another kind.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        window = config.sliding_window if config.use_sliding_window else None
        first = config.max_window_layers
        return [window if idx >= first else None for idx in range(config.num_hidden_layers)]
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise Unsupported(
            f"layer_types is {kinds!r}; supported are 'full_attention' and 'sliding_attention'"
        )
    # A sliding layer uses the field whatever its value is.
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


FAMILY = Family(
    names=NAMES,
    modeling="transformers.models.qwen2.modeling_qwen2",
    classes=decoder_classes("Qwen2", "ForCausalLM", "DecoderLayer"),
    outputs={"head": "CausalLMOutputWithPast", "base": "BaseModelOutputWithPast"},
    options=options,
    note=llama.note,
    rotates=True,
)
