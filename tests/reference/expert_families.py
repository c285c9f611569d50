"""Families with experts that the installed transformers names in its plans, in tiny sizes.

Five experts on two ranks are three and two, and four ranks have two, one, one and one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.reference import families
from tests.reference.families import Maker
from tests.reference.models import randomise_
from tests.reference.split_families import VOCABULARY, make_split_batch

_SIZES = {
    "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "num_experts_per_tok": 2,
}  # fmt: skip
_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.3}

_make = families.hugging_face
EXPERT_FAMILIES: dict[str, Maker] = {
    "mixtral": _make(
        "MixtralForCausalLM", "MixtralConfig",
        intermediate_size=12, num_local_experts=5, head_dim=4, **_SIZES, **_LOSS,
    ),
    "qwen3_moe": _make(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        intermediate_size=24, moe_intermediate_size=12, num_experts=5, head_dim=4,
        mlp_only_layers=[], **_SIZES, **_LOSS,
    ),
    "deepseek_v3": _make(
        "DeepseekV3ForCausalLM", "DeepseekV3Config",
        intermediate_size=24, moe_intermediate_size=12, n_routed_experts=6, n_group=2,
        topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
        **_SIZES | {"num_key_value_heads": 4},
    ),
    "gpt_oss": _make(
        "GptOssForCausalLM", "GptOssConfig",
        intermediate_size=12, num_local_experts=5, head_dim=4, sliding_window=4,
        **_SIZES, **_LOSS,
    ),
    "olmoe": _make(
        "OlmoeForCausalLM", "OlmoeConfig",
        intermediate_size=12, num_experts=5, **_SIZES, **_LOSS,
    ),
    "granitemoe": _make(
        "GraniteMoeForCausalLM", "GraniteMoeConfig",
        intermediate_size=12, num_local_experts=5, **_SIZES, **_LOSS,
    ),
}  # fmt: skip
#: Families whose loss has a part that balances the load.
WITH_AUXILIARY_LOSS = ("mixtral", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe")


def build_experts(
    case: str, dtype: torch.dtype, seed: int = 1, favourite: bool = False
) -> nn.Module:
    """A model of a family in training mode; every parameter has random values.

    In float64 its experts run one by one: torch has no grouped products of float64.
    """
    model: Any = EXPERT_FAMILIES[case](frozenset({"nocache"})).to(dtype)
    model.set_experts_implementation("eager" if dtype == torch.float64 else "grouped_mm")
    randomise_(model, seed).train()
    if favourite:
        _favour_first(model)
    return model


def _favour_first(model: nn.Module) -> None:
    """Makes routers send every token to the same experts, those with the lowest numbers.

    A constant that is far above what tokens make of it is added to their logits, larger for lower
    numbers. What the weights of the chosen ones are still depends on the token.
    """
    for name, parameter in list(model.named_parameters()):
        if name.endswith(("router.bias", "gate.bias")):
            parameter.data.copy_(torch.arange(parameter.shape[0], 0, -1) * 30.0)


def make_expert_batch(replica: int, step: int) -> dict[str, Tensor]:
    """Makes the batch of one replica in one step."""
    return make_split_batch("mixtral", replica, step)
