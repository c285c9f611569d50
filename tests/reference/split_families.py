"""The model families that have a distributed form, in sizes that four ranks can share unevenly.

Heads, key heads and intermediate features divide by four, the vocabulary does not. Everything else
keeps the defaults of the installed transformers, without dropout and caches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.reference import families
from tests.reference.families import Maker
from tests.reference.models import randomise_

VOCABULARY = 41
BATCH = 4
SEQUENCE = 7

_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
_GPT = {"n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 4}
_DEEP = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4}
_BERT = {**_DEEP, "intermediate_size": 24, "max_position_embeddings": 16, **_TOKENS}
_GROUPED = {
    **_TOKENS, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 16,
}  # fmt: skip

_T5 = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2,
    "num_heads": 4, "relative_attention_num_buckets": 8, "decoder_start_token_id": 0,
}  # fmt: skip

# Grouped products take no float64 where casts are lifted.
_EXPERTS = {**_GROUPED, "num_hidden_layers": 2, "experts_implementation": "eager"}

_make = families.hugging_face
SPLIT_FAMILIES: dict[str, Maker] = {
    "gpt2": _make("GPT2LMHeadModel", "GPT2Config", **_GPT, **_TOKENS),
    "gptj": _make("GPTJForCausalLM", "GPTJConfig", rotary_dim=2, **_GPT, **_TOKENS),
    "gptneo": _make(
        "GPTNeoForCausalLM", "GPTNeoConfig",
        max_position_embeddings=16, hidden_size=16, num_layers=4, num_heads=4, window_size=3,
        attention_types=[[["global", "local"], 2]], **_TOKENS,
    ),
    "gptneox": _make(
        "GPTNeoXForCausalLM", "GPTNeoXConfig",
        max_position_embeddings=16, intermediate_size=24, rotary_pct=0.5, **_DEEP, **_TOKENS,
    ),
    "bert": _make("BertForMaskedLM", "BertConfig", **_BERT),
    "roberta": _make("RobertaForMaskedLM", "RobertaConfig", **_BERT | {"pad_token_id": 1}),
}  # fmt: skip

# Families without a distributed form of their own, which are split by their plans.
PLANNED_FAMILIES: dict[str, Maker] = {
    "llama": _make("LlamaForCausalLM", "LlamaConfig", **_GROUPED),
    "mistral": _make("MistralForCausalLM", "MistralConfig", sliding_window=3, **_GROUPED),
    "qwen2": _make("Qwen2ForCausalLM", "Qwen2Config", **_GROUPED),
    "qwen3": _make("Qwen3ForCausalLM", "Qwen3Config", head_dim=4, **_GROUPED),
    # Fewer heads of keys than four ranks, and a head that shares the table.
    "qwen3_tied": _make(
        "Qwen3ForCausalLM", "Qwen3Config",
        head_dim=4, tie_word_embeddings=True, **_GROUPED | {"num_key_value_heads": 2},
    ),
    # Experts, in rows of gates and others that lie behind each other.
    "mixtral": _make(
        "MixtralForCausalLM", "MixtralConfig",
        num_local_experts=3, num_experts_per_tok=2, **_EXPERTS,
    ),
    "qwen3_moe": _make(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        head_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=10,
        **_EXPERTS,
    ),
    # A layer without experts, one with some that all tokens take; latent attention is whole.
    "deepseek_v3": _make(
        "DeepseekV3ForCausalLM", "DeepseekV3Config",
        q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
        moe_intermediate_size=10, **_EXPERTS | {"num_key_value_heads": 8},
    ),
    # Routers and their biases are parameters that stay in float32.
    "ernie4_5_moe": _make(
        "Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig",
        moe_num_experts=4, moe_k=2, moe_intermediate_size=10, moe_layer_start_index=1,
        moe_num_shared_experts=1, **_EXPERTS,
    ),
    # Plans of ours: biases of positions by head; in the second family each layer has its own.
    "t5": _make("T5ForConditionalGeneration", "T5Config", **_T5),
    "umt5": _make(
        "UMT5ForConditionalGeneration", "UMT5Config",
        feed_forward_proj="gated-gelu", **_T5 | {"num_heads": 8},
    ),
    # Latent attention is split.
    "deepseek_v2": _make(
        "DeepseekV2ForCausalLM", "DeepseekV2Config",
        q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
        moe_intermediate_size=10, **_EXPERTS | {"num_key_value_heads": 8},
    ),
}  # fmt: skip

# Families that transformers 4.30.2 has.
OLDER_SPLIT_FAMILIES = ("gpt2", "gptj", "gptneo", "gptneox", "bert", "roberta")


def make_split_family(case: str, dtype: torch.dtype, dropout: bool = False) -> nn.Module:
    """A model of a family; parameters as its class draws them."""
    options = frozenset({"nocache", "dropout"} if dropout else {"nocache"})
    return (SPLIT_FAMILIES | PLANNED_FAMILIES)[case](options).to(dtype)


def build_split_family(case: str, dtype: torch.dtype, seed: int = 1) -> nn.Module:
    """A model of a family in training mode; every parameter has random values."""
    return randomise_(make_split_family(case, dtype), seed).train()


def make_split_batch(case: str, replica: int, step: int) -> dict[str, Tensor]:
    """Makes one replica's batch of one step: padding at the right, some labels left out.

    Every replica and microbatch counts another number of labels.
    """
    generator = torch.Generator().manual_seed(7919 * (replica + 1) + 104729 * step)
    ids = torch.randint(2, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    lengths = torch.randint(3, SEQUENCE + 1, (BATCH, 1), generator=generator)
    mask = (torch.arange(SEQUENCE) < lengths).long()
    ids = ids * mask + (1 - mask) * (1 if case == "roberta" else 0)
    hidden = torch.rand(BATCH, SEQUENCE, generator=generator) < 0.3
    hidden[:, 1] = False  # each sample keeps a label, so that no mean is empty
    labels = ids.masked_fill((mask == 0) | hidden, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
