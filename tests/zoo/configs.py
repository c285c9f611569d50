"""Configurations of transformers made tiny by rule.

`tiny` walks the fields of a configuration and of those nested in it. What a field is follows from
its name (`RULES`); what a number becomes, from its old value, so that numbers which were equal
stay equal. Derived fields are left to the configuration's own code. `OVERRIDES` has what no name
tells, each with its reason.
"""

from __future__ import annotations

import dataclasses
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


def _at_most(limit: int) -> Rule:
    return lambda value: min(value, limit)


def _to(target: int) -> Rule:
    """Large numbers become `target`, small ones stay."""
    return lambda value: target if value > target else value


def _heads(value: int) -> int:
    return max(power for power in (1, 2, 4) if power <= max(1, min(value, HEADS)))


def _key_value_heads(value: int) -> int:
    return 1 if value == 1 else 2


def _keep(value: int) -> int:
    return value


# The first pattern that matches a name decides. Zero, negative numbers and None always stay.
RULES: tuple[tuple[str, Rule], ...] = (
    (r"ignore_index|_every_|_interval$|_period$|_step$|_frequency$|_offset$|_stride$", _keep),
    (r"vocab_size_per_layer|^vocab_size$|_vocab_size$|^n_vocab$|^vocab$", _to(VOCABULARY)),
    (r"^type_vocab|max_2d_position", _keep),
    (r"num_position_embeddings|position_embedding_size", _at_most(POSITIONS)),
    (r"relative_attention_(num_buckets|max_distance)|_num_buckets|^num_buckets", _at_most(8)),
    (r"num_conv_pos_embedding_groups|num_groups|norm_groups", _at_most(2)),
    (r"num_conv_pos_embeddings", _at_most(8)),
    (r"(^|_)(max_)?(\w*position\w*_embeddings|n_positions|n_ctx|context_length|seq_len(gth)?)$",
     _at_most(POSITIONS)),
    (r"max_(source|target|text|seq|sequence|len|relative).*(positions|len|length)", _at_most(POSITIONS)),
    (r"(key_value|kv)_?(n_)?heads|^num_kv_heads|num_query_groups|multi_query_group", _key_value_heads),
    (r"(^|_)(n_|num_)\w*heads?$|^(n|num)_heads?$|attention_heads$|_heads$|^heads$", _heads),
    (r"(head_dim|head_size|d_kv|d_head|dim_head|_head_dim|kv_channels)$", _to(HEAD_DIM)),
    (r"lora_rank|rank$", _to(8)),
    (r"experts?_per_tok|^moe_k$|top_?k(_|$)|_k$", _at_most(2)),
    (r"n_group$|topk_group|expert_group|^num_groups", _to(1)),
    (r"(n|num)_shared_experts?$", _at_most(1)),
    (r"experts?$|^num_local_experts|moe_num_experts|^n_routed", _at_most(EXPERTS)),
    (r"first_k_dense|num_dense_layers|max_window_layers|num_kv_shared|num_feature_levels", _at_most(1)),
    (r"layers?$|^(encoder|decoder)_layers|^n_layers?$|(^|_)depths?$|num_blocks|_blocks$|_repeats$"
     r"|^n_block|num_block_|numb_of_layers", _at_most(LAYERS)),
    (r"image_size|img_size|^resolution$|crop_size|^spec_size", _at_most(IMAGE)),
    (r"patch_size", _at_most(PATCH)),
    (r"window_size|sliding_window|local_attention$|attention_window|chunk_size|_window$", _at_most(4)),
    (r"num_frames", _at_most(2)),
    (r"num_queries|num_denoising|num_query_tokens|num_latents|latent_query_num|num_image_tokens"
     r"|mm_tokens_per_image|image_seq_length|num_proposals", _at_most(8)),
    (r"train_num_points", _at_most(32)),
    (r"num_codevectors_per_group|codebook_size", _at_most(32)),
    (r"_channels?$|^num_channels|^channels", _to(WIDTH)),
    (r"num_mel_bins|feature_size|^input_dim$", _at_most(WIDTH)),
    (r"intermediate|ffn_dim|ffn_hidden|d_ff$|^dff$|d_inner|n_inner|feedforward_dim|dim_ff|mlp_dim"
     r"|dim_feedforward|feed_?forward_size", _to(WIDTH)),
    (r"(hidden|embed|embedding|projection|proj|width|project|feature|features|output|model|latent"
     r"|condition|pooler|backbone|fusion|mask)\w*_(size|dim|dims|width|sizes)$", _to(WIDTH)),
    (r"^(d_model|n_embd|dim|hidden|width|embed_dim|embedding_size|hidden_sizes?|d_embed|n_state"
     r"|num_filters|codevector_dim|\w+_dim|\w+_units|conv_dim)$|_dim$", _to(WIDTH)),
    (r"(^|_)(d_)?state(_size)?$", _at_most(8)),
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in RULES)

# Probabilities of what makes two runs differ, and noise.
_RANDOM = re.compile(
    r"drop|mask_(time|feature)_prob|jitter|noise(?!_scheduler)|layerdrop|mask_ratio_never"
)
_TOKEN = re.compile(
    r"(_token_(id|index|ids)|_tok_id|_id|_index)$|^(bos|eos|pad|unk|mask|sep|cls)_(index|token_id)$"
)
_NO_TOKEN = re.compile(r"ignore|loss|layer|insert|in_index|lang_id|head_|eval_idx|dataset")

# (model type, field) -> value and why no rule knows it.
OVERRIDES: dict[tuple[str, str], tuple[Any, str]] = {}


def tiny(config: Any, **changes: Any) -> Any:
    """A new configuration of the same class with small numbers.

    Args:
        config: of transformers.
        changes: fields of the outermost one, after all rules.
    """
    tokens: dict[int, int] = {}
    _collect_tokens(config, tokens)
    return _shrink(config, tokens, changes)


def nested(config: Any) -> dict[str, Any]:
    """The configurations that are fields of a configuration."""
    return {n: v for n, v in vars(config).items() if _is_config(v)}


def _is_config(value: Any) -> bool:
    from transformers import PretrainedConfig

    return isinstance(value, PretrainedConfig)


def field_names(config: Any) -> list[str]:
    """What the class takes by name."""
    return [f.name for f in dataclasses.fields(config) if f.init and not f.name.startswith("_")]


def _is_token(name: str, value: Any) -> bool:
    return (
        type(value) is int
        and value >= 0
        and bool(_TOKEN.search(name))
        and not _NO_TOKEN.search(name)
    )


def _collect_tokens(config: Any, tokens: dict[int, int]) -> None:
    """Gives every special token a number below `FIRST_WORD`; equal ones stay equal."""
    for name, value in vars(config).items():
        if _is_config(value):
            _collect_tokens(value, tokens)
        elif _is_token(name, value) and value not in tokens:
            taken = set(tokens.values())
            free = (i for i in range(10, FIRST_WORD) if i not in taken)
            tokens[value] = value if value < 10 else next(free)


def _shrink(config: Any, tokens: dict[int, int], changes: dict[str, Any]) -> Any:
    old_layers = _layer_counts(config)
    kinds = _most_kinds(config, old_layers)
    arguments: dict[str, Any] = {}
    for name in field_names(config):
        value = getattr(config, name, None)
        new = _shrunk(name, value, tokens, old_layers, max(LAYERS, kinds))
        if new is not value:
            arguments[name] = new
    for (model_type, name), (value, _) in OVERRIDES.items():
        if model_type == config.model_type:
            arguments[name] = value
    return type(config)(**arguments | changes)


def _shrunk(
    name: str, value: Value, tokens: dict[int, int], old_layers: set[int], layers: int
) -> Value:
    if _is_config(value):
        return _shrink(value, tokens, {})
    if isinstance(value, bool) or value is None:
        return value
    if _is_token(name, value):
        return tokens[value]
    if name in ("id2label", "label2id"):
        return value
    if isinstance(value, float):
        return 0.0 if _RANDOM.search(name) else value
    if isinstance(value, int):
        if _RANDOM.search(name) and not re.search(r"length|masks", name):
            return 0
        if value in old_layers and _is_layer_count(name):
            return layers
        return _small(name, value)
    if isinstance(value, (list, tuple)):
        return _shrunk_list(name, value, old_layers, layers)
    if isinstance(value, dict):
        return _shrunk_dict(value)
    return value


def _small(name: str, value: int) -> int:
    if value <= 0:
        return value
    for pattern, rule in _COMPILED:
        if pattern.search(name):
            return rule(value)
    return value


def _shrunk_list(name: str, value: Any, old_layers: set[int], layers: int) -> Any:
    items = list(value)
    if len(items) in old_layers and len(items) > layers:
        firsts = [i for i, item in enumerate(items) if item not in items[:i]]
        rest = [i for i in range(len(items)) if i not in firsts]
        items = [items[i] for i in sorted((firsts + rest)[:layers])]
    if all(type(item) is int for item in items):
        if name.endswith(("indices", "indexes", "idxs", "idx")) or name in ("layers_to_use",):
            items = sorted({min(item, layers - 1) for item in items})
        else:
            items = [_small(name, item) for item in items]
    elif items and all(isinstance(item, (list, tuple)) for item in items):
        items = [_shrunk_list(name, item, set(), layers) for item in items]
    return type(value)(items)


def _shrunk_dict(value: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters: lists have a number for each pair of a head's dimensions."""
    result = dict(value)
    half = HEAD_DIM // 2
    for name, item in value.items():
        if name == "mrope_section":
            result[name] = [half - (len(item) - 1), *[1] * (len(item) - 1)]
        elif name in ("short_factor", "long_factor"):
            result[name] = list(item)[:half]
        elif isinstance(item, dict):
            result[name] = _shrunk_dict(item)
    return result


def _is_layer_count(name: str) -> bool:
    return name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")


def _layer_counts(config: Any) -> set[int]:
    counts = {getattr(config, n, None) for n in vars(config) if _is_layer_count(n)}
    return {count for count in counts if isinstance(count, int) and count > LAYERS}


def _most_kinds(config: Any, old_layers: set[int]) -> int:
    """Of how many kinds the layers of the configuration are, four at most."""
    most = 0
    for value in vars(config).values():
        if isinstance(value, (list, tuple)) and len(value) in old_layers:
            if all(isinstance(item, (str, bool)) for item in value):
                most = max(most, len(set(value)))
    return min(most, 4)
