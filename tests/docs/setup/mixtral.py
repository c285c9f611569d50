"""The configuration of a small Mixtral."""

from __future__ import annotations

from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

__all__ = ["MixtralForCausalLM", "config"]

config = MixtralConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=16,
)  # fmt: skip


def after(names: dict[str, Any]) -> None:
    """Checks that each rank has half of the experts, and that the model trains."""
    import smp

    model = names["model"]
    held = {n: p for n, p in model.named_parameters() if n.endswith("experts.down_proj")}
    assert held and all(p.shape[0] == 2 for p in held.values())
    ids = torch.randint(2, 32, (4, 12))
    model(input_ids=ids, labels=ids).loss.backward()
    assert smp.tp_size() == 2 and all(p.grad is not None for p in held.values())
