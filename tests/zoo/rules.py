"""Finds what a field of a configuration is, by its name, and shrinks its number.

`RULES` has patterns of names, `OVERRIDES` what no name tells, each with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

WIDTH = 32
HEADS = 4
HEAD_DIM = WIDTH // HEADS
LAYERS = 2
POSITIONS = 64
VOCABULARY = 99
FIRST_WORD = 50  # token ids below are for special tokens
EXPERTS = 4
IMAGE = 32
PATCH = 8

Value = Any
Rule = Callable[[int], int]


def at_most(limit: int) -> Rule:
    return lambda value: min(value, limit)


def to(target: int) -> Rule:
    """Large numbers become `target`, small ones stay."""
    return lambda value: target if value > target else value


def heads(value: int) -> int:
    return max(power for power in (1, 2, 4) if power <= max(1, min(value, HEADS)))


def key_value_heads(value: int) -> int:
    return 1 if value == 1 else 2


def keep(value: int) -> int:
    return value


def at_most_layers(value: int) -> int:
    return min(value, LAYERS)


def side(value: int) -> int:
    """Shrinks the side of a picture."""
    return min(value, IMAGE)


def patch(value: int) -> int:
    """Shrinks a patch; some models call the small pictures patches that make up a large one."""
    return IMAGE if value >= 4 * IMAGE else min(value, PATCH)


TO_WIDTH, TO_HEAD_DIM = to(WIDTH), to(HEAD_DIM)
WIDTHS = (TO_WIDTH, TO_HEAD_DIM)

# The first pattern that matches a name decides. Zero, negative numbers and None always stay.
RULES: tuple[tuple[str, Rule], ...] = (
    (r"ignore_index|_every_|_interval$|_period$|_step$|_frequency$|_offset$|_stride$", keep),
    (r"vocab_size_per_layer|^vocab_size$|_vocab_size$|^n_vocab$|^vocab$", to(VOCABULARY)),
    (r"_group_vocab$|vocab_size_base$", to(VOCABULARY)),
    (r"^type_vocab|max_2d_position", keep),
    (r"num_position_embeddings|position_embedding_size", at_most(POSITIONS)),
    (r"relative_attention_(num_buckets|max_distance)|_num_buckets|^num_buckets", at_most(8)),
    (r"num_conv_pos_embedding_groups|num_groups|norm_groups|(^|_)n_groups$", at_most(2)),
    (r"num_conv_pos_embeddings", at_most(8)),
    (r"(^|_)(max_)?(\w*position\w*_embeddings|n_positions|n_ctx|context_length|seq_len(gth)?)$",
     at_most(POSITIONS)),
    (r"max_(source|target|text|seq|sequence|len|relative).*(positions|len|length)",
     at_most(POSITIONS)),
    (r"(key_value|kv)_?(n_)?heads|^num_kv_heads|num_query_groups|multi_query_group",
     key_value_heads),
    (r"_heads$|^heads$|(^|_)(n|num)_(\w*_)?head$|heads_per_stage$", heads),
    (r"(head_dim|head_size|d_kv|d_head|dim_head|_head_dim|kv_channels)$", TO_HEAD_DIM),
    (r"rotary_dim$|^rotary_dim|rotary_ndims", TO_HEAD_DIM),
    (r"lora_rank|rank$", to(8)),
    (r"n_group$|topk_group|expert_group|^num_groups", to(1)),
    (r"experts?_per_tok|^moe_k$|top_?k(_|$)|_k$", at_most(2)),
    (r"(n|num)_shared_experts?$", at_most(1)),
    (r"experts?$|^num_local_experts|moe_num_experts|^n_routed", at_most(EXPERTS)),
    (r"first_k_dense|num_dense_layers|max_window_layers|num_kv_shared|_kpool$",
     at_most(1)),
    (r"^merge_index$", at_most(0)),
    (r"^label_length$", at_most(2)),
    (r"tokenizer_chunk_size", keep),
    (r"^num_filters$", at_most(4)),
    (r"upsample_groups", TO_WIDTH),
    (r"num_pos_feats", to(WIDTH // 2)),
    (r"context_size$|num_windows$|prompt_size$", at_most(4)),
    (r"layers?$|^(encoder|decoder)_layers|^n_layers?$|(^|_)depths?$|num_blocks|_blocks$|_repeats$"
     r"|^n_block|num_block_|numb_of_layers|(blocks|attends)_per_", at_most_layers),
    (r"image_size|img_size|^resolution$|crop_size|^spec_size|^train_size$", side),
    (r"patch_size", patch),
    (r"window_size|sliding_window|local_attention$|attention_window|chunk_size|_window$",
     at_most(4)),
    (r"num_frames", at_most(2)),
    (r"num_queries|num_denoising|num_query_tokens|num_latents$|latent_query_num|num_image_tokens"
     r"|mm_tokens_per_image|image_seq_length|num_proposals", at_most(8)),
    (r"train_num_points", at_most(32)),
    (r"num_codevectors_per_group|codebook_size", at_most(32)),
    (r"^bottleneck_features$|_channels?$|^num_channels|^channels|channel_list$|^out_features$"
     r"|hidden_size_global$|dim_per_stage$|unit_dims$|_latents$", TO_WIDTH),
    (r"num_mel_bins|feature_size|^input_dim$", at_most(WIDTH)),
    (r"intermediate|ffn_dim|ffn_hidden|d_ff$|^dff$|d_inner|n_inner|feedforward_dim|dim_ff|mlp_dim"
     r"|dim_feedforward|feed_?forward_size", TO_WIDTH),
    (r"(hidden|embed|embedding|projection|proj|width|project|feature|features|output|model|latent"
     r"|condition|pooler|backbone|fusion|mask)\w*_(size|dim|dims|width|sizes)$", TO_WIDTH),
    (r"^(d_model|n_embd|dim|hidden|width|embed_dim|embedding_size|hidden_sizes?|d_embed|n_state"
     r"|codevector_dim|\w+_dim|\w+_units|conv_dim)$|_dim$", TO_WIDTH),
    (r"(^|_)(d_)?state(_size)?$", at_most(8)),
)  # fmt: skip
HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim")
HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
COUNTS_OF_HEADS = (heads, key_value_heads)
COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in RULES)

# Probabilities of what makes two runs differ, and noise.
RANDOM = re.compile(
    r"drop|mask_(time|feature)_prob|jitter|noise(?!_scheduler)|layerdrop|mask_ratio_never"
)
TOKEN = re.compile(
    r"(_token_(id|index|ids)|_tok_id|_id|_index)$|^(bos|eos|pad|unk|mask|sep|cls)_(index|token_id)$"
)
NO_TOKEN = re.compile(r"ignore|loss|layer|insert|in_index|lang_id|head_|eval_idx|dataset|^merge_")

# (model type, field) -> value and why no rule knows it.
OVERRIDES: dict[tuple[str, str], tuple[Any, str]] = {
    ("reformer", "axial_pos_embds_dim"): ([16, 16], "adds up to the width"),
    ("reformer", "axial_pos_shape"): ([2, 4], "multiplies to the length in training"),
    ("reformer", "local_attn_chunk_length"): (4, "divides the length"),
    ("reformer", "lsh_attn_chunk_length"): (4, "divides the length"),
    ("lilt", "hidden_size"): (48, "a sixth of it, six times, is the width of a box"),
    ("layoutlmv3", "coordinate_size"): (6, "four of it and two shapes are the width"),
    ("layoutlmv3", "shape_size"): (4, "four coordinates and two of it are the width"),
    ("xmod", "default_language"): ("en_XX", "training needs one"),
    ("xmod", "languages"): (["en_XX"], "one adapter per language"),
    ("chameleon_vlm", "vocabulary_map"): ({"<image>": 10}, "is filled from the tokenizer"),
    ("chameleon", "vocabulary_map"): ({"<image>": 10}, "is filled from the tokenizer"),
    ("lfm2_moe", "layer_types"): (["conv", "full_attention"], "has no default"),
    ("mpnet", "relative_attention_num_buckets"): (32, "is fixed in the code"),
    ("gpt_neo", "attention_types"): ([[["global", "local"], 1]], "a pattern and how often"),
    ("bros", "dim_bbox_sinusoid_emb_2d"): (32, "a number for each of eight corners, four apart"),
    ("bros", "dim_bbox_sinusoid_emb_1d"): (4, "an eighth of the other"),
    ("bros", "dim_bbox_projection"): (8, "the width of a head"),
    ("efficientnet", "width_coefficient"): (0.1, "a part of 1280 is the width of the last layer"),
    ("efficientnet", "hidden_dim"): (128, "a tenth of 1280"),
    ("align_vision_model", "width_coefficient"): (1.0, "multiplies to the width of the text"),
}
