"""Corrects fields of a configuration that have to agree, and fills fields that stay open.

`tests.zoo.configs` shrinks field by field. What follows from several fields, or from a field and
the class beside it, is put right here, by the names of the fields.
"""

from __future__ import annotations

import re
from typing import Any

from tests.zoo.rules import EXPERTS, HEAD_DIM, HEADS, LAYERS, VOCABULARY, WIDTH

Arguments = dict[str, Any]

# (factors), (factors): where both products are equal, the last of the first is made to fit.
PRODUCTS = (
    (("mamba_n_heads", "mamba_d_head"), ("mamba_expand", "hidden_size")),
    (("attention_hidden_size",), ("mamba_expand", "hidden_size")),
    (("num_attention_heads", "attention_head_dim"), ("attention_hidden_size",)),
)
# Kinds of layers without keys and values: code for hybrid models looks for a layer with them.
_WITHOUT_KEYS = {"linear_attention", "mamba", "conv"}

# Fields that a configuration leaves open and its model needs.
OPEN: Arguments = {
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
# The same where other code would make them of other fields, so only after it failed; these are
# given to configurations that lack the attribute, too.
FILLED: Arguments = {
    "head_dim": HEAD_DIM,
    "sliding_window": 4,
    "attn_layer_indices": [1],
    "image_token_index": 7,
    "image_token_id": 7,
    "video_token_index": 9,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_DIM,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "upsample_out_channels": [WIDTH],
    "upsample_kernel_sizes": [4],
    "conv_out_channels": [WIDTH],
    "conv_kernel_sizes": [1],
    "deepstack_layer_map": [[-2, 0]],
    "downsample_rate": "1/2",
    "clip_qkv": 8.0,
    "projector_scale_factors": [1.0],
}
MISSING: Arguments = {
    "rope_theta": 10000.0,
    "num_key_value_heads": HEADS,
    "vision_start_token_id": 8,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "yes_token_index": 11,
    "no_token_index": 12,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def fill(config: Any, arguments: Arguments, layers: int) -> None:
    """Gives values to what stayed open, where the models' code has none of its own."""
    for name, value in vars(config).items():
        if name in FILLED and (value is None or value in ([], ())):
            arguments[name] = FILLED[name]
        elif value is None and name == "mlp_layer_types":
            arguments[name] = ["dense"] + ["sparse"] * (layers - 1)
        elif isinstance(value, tuple) and isinstance(arguments.get(name, value), tuple):
            arguments[name] = list(arguments.get(name, value))  # as it is read from a file
    kinds = arguments.get("layer_types", getattr(config, "layer_types", None))
    rope = getattr(config, "rope_parameters", None)
    if kinds and isinstance(rope, dict) and "rope_theta" not in rope:
        given = arguments.get("rope_parameters", rope)
        arguments["rope_parameters"] = {
            kind: given.get(kind, _ROPE) for kind in dict.fromkeys(kinds)
        }


def add_missing(config: Any) -> None:
    """Gives a configuration the attributes that models read although its class has none."""
    for name, value in MISSING.items():
        if not hasattr(config, name):
            setattr(config, name, value)


def agree(config: Any, arguments: Arguments) -> None:
    """Changes arguments so that products are equal which were."""
    for (*fixed, last), others in PRODUCTS:
        names = (*fixed, last, *others)
        old = {name: vars(config).get(name) for name in names}
        if not all(isinstance(value, int) and value > 0 for value in old.values()):
            continue
        if _product(old, (*fixed, last)) == _product(old, others):
            new = {name: arguments.get(name, old[name]) for name in names}
            arguments[last] = _product(new, others) // _product(new, tuple(fixed))
    kinds = arguments.get("layer_types")
    if kinds and len(set(kinds)) == 1 and kinds[0] in _WITHOUT_KEYS:
        if vars(config).get("num_attention_heads"):
            arguments["layer_types"] = [*kinds[:-1], "full_attention"]


def _product(values: Arguments, names: tuple[str, ...]) -> int:
    product = 1
    for name in names:
        product *= values[name]
    return product


def set_stages(old: Any, new: Any) -> None:
    """Stages of a backbone that its user reads: as many, the same where there are as many."""
    indices, names = getattr(old, "_out_indices", None), getattr(old, "stage_names", None)
    if not indices or not names:
        return
    stages = [index % len(names) for index in indices]
    count = len(new.stage_names)
    if stages == [len(names) - 1] or len(stages) > count:
        return
    if max(stages) >= count:
        stages = list(range(count - len(stages), count))
    new.out_indices = stages


def small_backbone(config: Any) -> Any:
    """Makes a backbone of transformers that replaces a package's, with as many stages."""
    from transformers import ResNetConfig

    indices = list(getattr(config, "out_indices", None) or [4])
    return ResNetConfig(
        num_channels=config.num_channels,
        embedding_size=WIDTH,
        hidden_sizes=[WIDTH] * 4,
        depths=[1, 1, LAYERS, 1],
        layer_type="basic",
        out_indices=[index % 5 for index in indices],
    )


def small_wrapper(config: Any) -> Any:
    """The same architecture as one of the package's own models for tests."""
    import timm

    transformer = re.search(r"(^|_)vit|^eva", config.architecture)
    name = "test_vit" if transformer else "test_resnet"
    width = timm.create_model(name).num_features
    given = getattr(config, "model_args", None) or {}
    arguments = {key: given[key] for key in ("features_only", "out_indices") if key in given}
    if "embed_dim" in given:
        arguments["embed_dim"] = width
    small = type(config)(
        architecture=name, do_pooling=config.do_pooling, num_labels=2, model_args=arguments or None
    )
    small.hidden_size = width
    return small
