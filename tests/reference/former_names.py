"""The names that parameters of Llama, Mistral and Qwen2 had while these had a distributed form."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

_PARTS = {
    "input_layernorm": "attention.pre_layernorm",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.dense",
    "post_attention_layernorm": "output.pre_layernorm",
    "mlp.gate_proj": "output.gate",
    "mlp.up_proj": "output.dense1",
    "mlp.down_proj": "output.dense2",
    "model.embed_tokens": "word_embedding",
    "model.norm": "layernorm",
}


def former_name(name: str) -> str:
    """The former name of a parameter of a language model."""
    name = name.replace("model.layers.", "transformer.seq_layers.")
    for part, former in _PARTS.items():
        name = re.sub(rf"(^|\.){re.escape(part)}(?=\.)", rf"\1{former}", name)
    return name


def make_former(folder: Path, family: str, module_cls: str) -> None:
    """Turns a checkpoint of a whole model into one from before."""
    from smp.checkpoint import manifest as manifests

    manifest = manifests.read(folder)
    entries = {}
    for entry, stored in manifest.entries.items():
        kind, _, name = entry.partition("/")
        entries[f"{kind}/{former_name(name)}"] = stored
    values: dict[str, Any] = {**manifest.values, "registrations": [[family, module_cls]]}
    values["state"] = {former_name(name): state for name, state in values["state"].items()}
    values["aliases"] = {former_name(a): former_name(b) for a, b in values["aliases"].items()}
    values["groups"] = [
        {**group, "names": [former_name(name) for name in group["names"]]}
        for group in values["groups"]
    ]
    former = dataclasses.replace(manifest, entries=entries, values=values)
    (folder / manifests.FILE_NAME).write_bytes(former.to_text())
