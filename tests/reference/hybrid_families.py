"""Tiny models whose layers leave more than keys and values in the cache of their model.

As `tests.reference.families`: the default ``use_cache``, of the installed transformers. Experts run
in plain PyTorch, because the grouped product has no float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "vocab_size": 41, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_DELTA = {
    "linear_conv_kernel_dim": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 8,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}  # fmt: skip


def _kinds(linear: str, full: str) -> dict[str, Any]:
    return {"layer_types": [linear, full] * 2}


_CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "hybrid/qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **_DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8, **_kinds("linear_attention", "full_attention"),
        },
    ),
    "hybrid/qwen3_5": (
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {**_DELTA, **_kinds("linear_attention", "full_attention")},
    ),
    "hybrid/lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {"block_multiple_of": 8, **_kinds("conv", "full_attention")},
    ),
    "hybrid/bamba": ("BambaForCausalLM", "BambaConfig", {**_MAMBA, "attn_layer_indices": [1, 3]}),
    "hybrid/jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            "mamba_d_state": 4, "mamba_dt_rank": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
            "expert_layer_period": 2, "num_experts": 2, "use_mamba_kernels": False,
        },
    ),
    "hybrid/zamba2": (
        "Zamba2ForCausalLM",
        "Zamba2Config",
        {
            "mamba_d_state": 4, "mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_headdim": 8,
            "chunk_size": 4, "adapter_rank": 2, "num_mem_blocks": 1,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
        },
    ),
    "hybrid/minimax": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {"block_size": 4, "num_local_experts": 2, **_kinds("linear_attention", "full_attention")},
    ),
    "hybrid/falcon_h1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {**_MAMBA, "mamba_d_ssm": 16, "mamba_d_head": 4},
    ),
}  # fmt: skip


def _maker(model: str, config: str, sizes: dict[str, Any]) -> Callable[[frozenset[str]], nn.Module]:
    def make(options: frozenset[str]) -> nn.Module:
        import transformers

        arguments = {**_SIZES, **sizes, "experts_implementation": "eager"}
        if "nocache" in options:
            arguments["use_cache"] = False
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**arguments))
        return made

    return make


HYBRID = {name: _maker(*parts) for name, parts in _CLASSES.items()}
