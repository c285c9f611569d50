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


_TO_WIDTH, _TO_HEAD_DIM = _to(WIDTH), _to(HEAD_DIM)
_WIDTHS = (_TO_WIDTH, _TO_HEAD_DIM)

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
    (r"max_(source|target|text|seq|sequence|len|relative).*(positions|len|length)",
     _at_most(POSITIONS)),
    (r"(key_value|kv)_?(n_)?heads|^num_kv_heads|num_query_groups|multi_query_group",
     _key_value_heads),
    (r"_heads$|^heads$|(^|_)(n|num)_(\w*_)?head$", _heads),
    (r"(head_dim|head_size|d_kv|d_head|dim_head|_head_dim|kv_channels)$", _TO_HEAD_DIM),
    (r"rotary_dim$|^rotary_dim|rotary_ndims", _TO_HEAD_DIM),
    (r"lora_rank|rank$", _to(8)),
    (r"n_group$|topk_group|expert_group|^num_groups", _to(1)),
    (r"experts?_per_tok|^moe_k$|top_?k(_|$)|_k$", _at_most(2)),
    (r"(n|num)_shared_experts?$", _at_most(1)),
    (r"experts?$|^num_local_experts|moe_num_experts|^n_routed", _at_most(EXPERTS)),
    (r"first_k_dense|num_dense_layers|max_window_layers|num_kv_shared|num_feature_levels",
     _at_most(1)),
    (r"layers?$|^(encoder|decoder)_layers|^n_layers?$|(^|_)depths?$|num_blocks|_blocks$|_repeats$"
     r"|^n_block|num_block_|numb_of_layers", _at_most(LAYERS)),
    (r"image_size|img_size|^resolution$|crop_size|^spec_size", _at_most(IMAGE)),
    (r"patch_size", _at_most(PATCH)),
    (r"window_size|sliding_window|local_attention$|attention_window|chunk_size|_window$",
     _at_most(4)),
    (r"num_frames", _at_most(2)),
    (r"num_queries|num_denoising|num_query_tokens|num_latents|latent_query_num|num_image_tokens"
     r"|mm_tokens_per_image|image_seq_length|num_proposals", _at_most(8)),
    (r"train_num_points", _at_most(32)),
    (r"num_codevectors_per_group|codebook_size", _at_most(32)),
    (r"_channels?$|^num_channels|^channels", _TO_WIDTH),
    (r"num_mel_bins|feature_size|^input_dim$", _at_most(WIDTH)),
    (r"intermediate|ffn_dim|ffn_hidden|d_ff$|^dff$|d_inner|n_inner|feedforward_dim|dim_ff|mlp_dim"
     r"|dim_feedforward|feed_?forward_size", _TO_WIDTH),
    (r"(hidden|embed|embedding|projection|proj|width|project|feature|features|output|model|latent"
     r"|condition|pooler|backbone|fusion|mask)\w*_(size|dim|dims|width|sizes)$", _TO_WIDTH),
    (r"^(d_model|n_embd|dim|hidden|width|embed_dim|embedding_size|hidden_sizes?|d_embed|n_state"
     r"|num_filters|codevector_dim|\w+_dim|\w+_units|conv_dim)$|_dim$", _TO_WIDTH),
    (r"(^|_)(d_)?state(_size)?$", _at_most(8)),
)  # fmt: skip
_HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim")
_HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
_COUNTS_OF_HEADS = (_heads, _key_value_heads)
_COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in RULES)

# Probabilities of what makes two runs differ, and noise.
_RANDOM = re.compile(
    r"drop|mask_(time|feature)_prob|jitter|noise(?!_scheduler)|layerdrop|mask_ratio_never"
)
_TOKEN = re.compile(
    r"(_token_(id|index|ids)|_tok_id|_id|_index)$|^(bos|eos|pad|unk|mask|sep|cls)_(index|token_id)$"
)
_NO_TOKEN = re.compile(r"ignore|loss|layer|insert|in_index|lang_id|head_|eval_idx|dataset")

# Fields that a configuration leaves open and its model needs.
_OPEN: dict[str, Any] = {
    "pad_token_id": 0,  # heads for sequences look for padding
    "vocab_size": VOCABULARY,
    "n_routed_experts": EXPERTS,
    "num_experts": EXPERTS,
    "prediction_length": 4,
    "num_key_value_heads": HEADS,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "topk_group": 1,
    "n_group": 1,
}

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
    ("bridgetower", "num_attention_heads"): (4, "is divided by 64 in the code"),
    ("granite_speech5", "context_size"): (16, "below the number of positions"),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way of shrinking; which one a configuration stands is found out by trying.

    Attributes:
        derived: hand on fields that have no default, too; else the configuration makes them.
        grouped: fewer heads of keys than of queries, where the configuration has that.
        layers: how many.
        scaled: divide all widths by one factor and keep the numbers of heads, so that sums and
            products of widths stay right.
        widths: whether widths become small at all.
        sections: say how rotary dimensions are divided among axes; some code has that as a
            constant.
    """

    derived: bool = True
    grouped: bool = True
    layers: int = LAYERS
    scaled: bool = False
    widths: bool = True
    sections: bool = False


VARIANTS = (
    Variant(),
    Variant(derived=False),
    Variant(derived=False, grouped=False),
    Variant(sections=True),
    Variant(layers=6),
    Variant(scaled=True),
    Variant(scaled=True, derived=False),
    Variant(widths=False),
)


def tiny(config: Any, variant: Variant = VARIANTS[0]) -> Any:
    """A new configuration of the same class with small numbers."""
    tokens: dict[int, int] = {}
    _collect_tokens(config, tokens)
    return _Shrinking(variant, tokens).shrink(config)


def nested(config: Any) -> dict[str, Any]:
    """The configurations that are fields of a configuration."""
    return {n: v for n, v in vars(config).items() if _is_config(v)}


def _is_config(value: Any) -> bool:
    from transformers import PretrainedConfig

    return isinstance(value, PretrainedConfig)


def _fields(config: Any) -> list[tuple[str, Any]]:
    """What the class takes by name, with its default."""
    fields = [f for f in dataclasses.fields(config) if f.init and not f.name.startswith("_")]
    return [(f.name, f.default if f.default_factory is dataclasses.MISSING else 0) for f in fields]


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _is_given(value: Any) -> bool:
    """Whether a field without a default has to be handed on: other code cannot make it again."""
    if isinstance(value, (list, tuple)):
        return bool(value) and isinstance(value[0], (str, bool))
    return _is_config(value) or (isinstance(value, dict) and bool(value))


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


class _Shrinking:
    """One variant over one tree of configurations."""

    def __init__(self, variant: Variant, tokens: dict[int, int]) -> None:
        self.variant = variant
        self.tokens = tokens
        # Of the configuration in hand:
        self.old_layers: set[int] = set()
        self.layers = variant.layers
        self.factor = 1
        self.grouped = True

    def shrink(self, config: Any) -> Any:
        outer = (self.old_layers, self.layers, self.factor, self.grouped)
        self.grouped = _is_grouped(config)
        self.old_layers = _layer_counts(config)
        self.layers = max(
            self.variant.layers,
            _most_kinds(config, self.old_layers),
            _most_indices(config) if self.old_layers else 0,
        )
        if self.variant.scaled:
            self.factor = max(_factor(config), 1)
        values = vars(config)
        arguments: dict[str, Any] = {}
        for name, default in _fields(config):
            value = values.get(name)
            if value is None and name in _OPEN:
                arguments[name] = _OPEN[name]
                continue
            if default is None and not self.variant.derived and not _is_given(value):
                continue
            new = self.shrunk(name, value)
            if new is not value or (value is not None and not _same(value, default)):
                arguments[name] = new
        for (model_type, name), (value, _) in OVERRIDES.items():
            if model_type == config.model_type:
                arguments[name] = value
        self.old_layers, self.layers, self.factor, self.grouped = outer
        return type(config)(**arguments)

    def shrunk(self, name: str, value: Value) -> Value:
        if _is_config(value):
            return self.shrink(value)
        if isinstance(value, bool) or value is None or name in ("id2label", "label2id"):
            return value
        if _is_token(name, value):
            return self.tokens[value]
        if isinstance(value, float):
            return 0.0 if _RANDOM.search(name) else value
        if isinstance(value, int):
            return self.integer(name, value)
        if isinstance(value, (list, tuple)):
            return self.sequence(name, value)
        if isinstance(value, dict):
            if self.variant.sections and "rope_theta" in value:
                value = {"mrope_section": [1, 1, 1], **value}
            return _shrunk_dict(value, self.factor if self.variant.scaled else None)
        return value

    def integer(self, name: str, value: int) -> int:
        if value <= 0:
            return value
        if _RANDOM.search(name) and not re.search(r"length|masks", name):
            return 0
        if value in self.old_layers and _is_layer_count(name):
            return self.layers
        for pattern, rule in _COMPILED:
            if pattern.search(name):
                return self.by_rule(rule, value)
        return value

    def by_rule(self, rule: Rule, value: int) -> int:
        if rule is _key_value_heads and not (self.grouped and self.variant.grouped):
            rule = _heads
        if rule in _WIDTHS:
            if not self.variant.widths:
                return value
            if self.variant.scaled:
                divides = value % self.factor == 0
                return value // self.factor if divides else value
        if rule in _COUNTS_OF_HEADS and (self.variant.scaled or not self.variant.widths):
            return value
        return rule(value)

    def indices(self, items: list[int]) -> list[int]:
        """As many, different, and none behind the last layer."""
        if not self.old_layers or max(items) < self.layers:
            return items
        return list(range(self.layers - len(items), self.layers))

    def sequence(self, name: str, value: Any) -> Any:
        items = list(value)
        if len(items) in self.old_layers and len(items) > self.layers:
            firsts = [i for i, item in enumerate(items) if item not in items[:i]]
            rest = [i for i in range(len(items)) if i not in firsts]
            items = [items[i] for i in sorted((firsts + rest)[: self.layers])]
        if items and all(type(item) is int for item in items):
            if name.endswith(_INDICES):
                items = self.indices(items)
            else:
                items = [self.integer(name, item) for item in items]
        elif items and all(isinstance(item, (list, tuple)) for item in items):
            items = [self.sequence(name, item) for item in items]
        return type(value)(items)


def _most_indices(config: Any) -> int:
    """How many layers lists of indices name, and one more."""
    lists = [v for n, v in vars(config).items() if n.endswith(_INDICES) and isinstance(v, list)]
    return max((len(v) + 1 for v in lists if len(v) > 1), default=0)


def _is_grouped(config: Any) -> bool:
    """Whether there are fewer heads of keys than of queries."""
    values = vars(config)
    heads = next((values[n] for n in _HEAD_COUNTS if isinstance(values.get(n), int)), None)
    groups = values.get("num_key_value_heads")
    return heads is None or groups is None or groups < heads


_INDICES = ("indices", "indexes", "idxs", "idx")


def _factor(config: Any) -> int:
    """By what widths are divided: heads become as wide as `HEAD_DIM`."""
    values = vars(config)
    width = next((values[n] for n in ("head_dim", "d_kv", "d_head") if values.get(n)), None)
    if width is None:
        hidden = next((values[n] for n in _HIDDEN if isinstance(values.get(n), int)), 0)
        heads = next((values[n] for n in _HEAD_COUNTS if isinstance(values.get(n), int)), 0)
        width = hidden // heads if heads else hidden // 4
    power = 1
    while isinstance(width, int) and width // (2 * power) >= HEAD_DIM:
        power *= 2
    return power


def _shrunk_dict(value: dict[str, Any], factor: int | None) -> dict[str, Any]:
    """Rotary parameters: lists have a number for each pair of a head's rotated dimensions."""
    result = dict(value)
    pairs = int(HEAD_DIM * value.get("partial_rotary_factor", 1.0)) // 2
    for name, item in value.items():
        if name == "mrope_section" and factor is not None:
            result[name] = [max(1, number // factor) for number in item]
        elif name == "mrope_section":
            ones = min(len(item), pairs) - 1
            result[name] = [pairs - ones, *[1] * ones, *[0] * (len(item) - 1 - ones)]
        elif name in ("short_factor", "long_factor"):
            result[name] = list(item)[:pairs]
        elif isinstance(item, dict):
            result[name] = _shrunk_dict(item, factor)
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
