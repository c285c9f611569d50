"""Names and buffers of the installed release of transformers, read from a tiny model of it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Names of a language-modelling head over all releases.
HEADS = ("lm_head", "embed_out")

_SMALL = {"vocab_size": 4, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_WIDTHS = {"hidden_size": 4, "intermediate_size": 4, "max_position_embeddings": 4}
_LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 1}
_GPT = {"n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 1}
# Class and configuration arguments by family, and the prefix of its first layer.
_SAMPLES: Mapping[str, tuple[str, str, Mapping[str, Any], str]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT, "transformer.h.0."),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**_GPT, "rotary_dim": 4}, "transformer.h.0."),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {**_WIDTHS, "num_layers": 1, "num_heads": 1, "attention_types": [[["global"], 1]]},
        "transformer.h.0.",
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**_WIDTHS, **_LAYERS},
        "gpt_neox.layers.0.",
    ),
    "bert": ("BertModel", "BertConfig", {**_WIDTHS, **_LAYERS}, "encoder.layer.0."),
    "roberta": ("RobertaModel", "RobertaConfig", {**_WIDTHS, **_LAYERS}, "encoder.layer.0."),
}


@functools.cache
def _sample(family: str) -> tuple[frozenset[str], dict[str, torch.dtype]] | None:
    """Returns all keys of the family's state dict, and dtypes of its buffers by key.

    Returns None without transformers.
    """
    if family not in _SAMPLES:
        return frozenset(), {}
    model_name, config_name, sizes, _ = _SAMPLES[family]
    try:
        transformers = importlib.import_module("transformers")
        model_cls, config_cls = (
            getattr(transformers, model_name),
            getattr(transformers, config_name),
        )
    except (ImportError, AttributeError):
        return None
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        model = model_cls(config_cls(**_SMALL, **sizes))
    state: dict[str, Tensor] = model.state_dict()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    stored = {key: value.dtype for key, value in state.items() if key not in parameters}
    return frozenset(state), stored


def is_known() -> bool:
    """Returns whether transformers can be imported."""
    return _sample("gpt2") is not None


def head_of(family: str) -> str:
    """Returns the name of the family's language-modelling head."""
    if family != "gpt_neox":
        return "lm_head"
    sample = _sample(family)
    return "embed_out" if sample is None or "embed_out.weight" in sample[0] else "lm_head"


def layer_buffers(family: str) -> dict[str, torch.dtype]:
    """Returns the dtypes of the buffers that each layer has in a state dict, by name."""
    sample = _sample(family)
    if sample is None:
        return {}
    prefix = _SAMPLES[family][3] if family in _SAMPLES else ""
    return {
        key.removeprefix(prefix): dtype
        for key, dtype in sample[1].items()
        if prefix and key.startswith(prefix)
    }


def stores_positions(family: str) -> bool:
    """Returns whether embeddings of the family have ``position_ids`` in a state dict."""
    sample = _sample(family)
    return sample is not None and "embeddings.position_ids" in sample[1]
