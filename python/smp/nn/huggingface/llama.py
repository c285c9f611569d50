"""Translates checkpoints of Llama, Mistral and Qwen2 from before these were split by their plans.

The distributed form that these families had, had other names than Hugging Face.
"""

from __future__ import annotations

from collections.abc import Iterable

from smp.nn.huggingface.translation import Names, layer_translators, translators

#: Values of ``model_type`` of the families that had these names.
FAMILIES = frozenset({"llama", "mistral", "qwen2"})
NAMES = Names(
    family="llama",
    base="model.",
    layers="layers",
    outer={"embed_tokens": "word_embedding", "norm": "layernorm"},
    inner={
        "input_layernorm": "attention.pre_layernorm",
        "self_attn.q_proj": "attention.query",
        "self_attn.k_proj": "attention.key",
        "self_attn.v_proj": "attention.value",
        "self_attn.o_proj": "attention.dense",
        "post_attention_layernorm": "output.pre_layernorm",
        "mlp.gate_proj": "output.gate",
        "mlp.up_proj": "output.dense1",
        "mlp.down_proj": "output.dense2",
    },
    anchor=("self_attn.q_proj.weight", "input_layernorm.weight", "mlp.gate_proj.weight"),
    ours_has=("attention.query.weight", "attention.pre_layernorm.weight", "output.gate.weight"),
    ignored=frozenset({"self_attn.rotary_emb.inv_freq"}),
)


translate_state_dict_to_hf_llama, _ = translators(NAMES)


def present_names(module_cls: str, names: Iterable[str]) -> dict[str, str]:
    """Returns the present names of tensors by their former ones.

    Args:
        module_cls: name of the class that a distributed form had replaced.
        names: all names of a state dict.
    """
    pair = layer_translators(NAMES)
    if not module_cls.endswith("DecoderLayer"):
        is_head = module_cls.endswith("ForCausalLM")
        pair = translators(NAMES, prefer="head" if is_head else "base")
    renamed = pair[0]({name: name for name in names})
    # A tied head is listed before its table, whose name counts.
    return {former: present for present, former in renamed.items()}
