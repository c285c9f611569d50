"""Configurations of transformers made tiny by rule.

`tiny` walks the fields of a configuration and of those nested in it. What a field is follows from
its name (`tests.zoo.rules`); what a number becomes, from its old value, so that numbers which were
equal stay equal. Derived fields are left to the configuration's own code. What several fields have
to agree about is in `tests.zoo.relations`.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

from tests.zoo import relations
from tests.zoo.rules import (
    COMPILED,
    COUNTS_OF_HEADS,
    FIRST_WORD,
    HEAD_COUNTS,
    HEAD_DIM,
    HIDDEN,
    LAYERS,
    NO_TOKEN,
    OVERRIDES,
    RANDOM,
    TOKEN,
    WIDTHS,
    Rule,
    Value,
    at_most_layers,
    heads,
    key_value_heads,
    patch,
    side,
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way of shrinking; which one a configuration stands is found out by trying.

    Attributes:
        derived: hand on fields that have no default, too; else the configuration makes them.
        grouped: fewer heads of keys than of queries, where the configuration has that.
        layers: number of layers.
        scaled: divide all widths by one factor and keep the numbers of heads, so that sums and
            products of widths stay right.
        widths: whether widths become small at all.
        sections: say how rotary dimensions are divided among axes; some code has that as a
            constant.
        filled: give values to fields that stayed open, too.
        times: widths and heads are so many times as wide.
        pictures: pictures and patches are so many times as large.
    """

    derived: bool = True
    grouped: bool = True
    layers: int = LAYERS
    scaled: bool = False
    widths: bool = True
    sections: bool = False
    filled: bool = False
    times: int = 1
    pictures: int = 1


VARIANTS = (
    Variant(),
    Variant(derived=False),
    Variant(derived=False, grouped=False),
    Variant(sections=True),
    Variant(layers=6),
    Variant(scaled=True),
    Variant(scaled=True, derived=False),
    Variant(filled=True),
    Variant(filled=True, times=4, sections=True),
    Variant(filled=True, pictures=4),
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
    """Returns the names that the class takes, with their defaults."""
    fields = [f for f in dataclasses.fields(config) if f.init and not f.name.startswith("_")]
    return [(f.name, f.default if f.default_factory is dataclasses.MISSING else 0) for f in fields]


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _is_given(value: Any) -> bool:
    """Returns whether a field without a default is handed on: other code cannot make it again."""
    if isinstance(value, (list, tuple)):
        return bool(value) and isinstance(value[0], (str, bool))
    return _is_config(value) or (isinstance(value, dict) and bool(value))


def _is_token(name: str, value: Any) -> bool:
    return (
        type(value) is int and value >= 0 and bool(TOKEN.search(name)) and not NO_TOKEN.search(name)
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
    """Shrinks one tree of configurations by one variant."""

    def __init__(self, variant: Variant, tokens: dict[int, int]) -> None:
        self.variant = variant
        self.tokens = tokens
        # State of the configuration that is shrunk:
        self.old_layers: set[int] = set()
        self.layers = variant.layers
        self.factor = 1
        self.grouped = True

    def shrink(self, config: Any) -> Any:
        if config.model_type == "timm_backbone":
            return relations.small_backbone(config)
        if config.model_type == "timm_wrapper":
            return relations.small_wrapper(config)
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
        arguments = self.arguments(config)
        self.old_layers, self.layers, self.factor, self.grouped = outer
        new = type(config)(**arguments)
        relations.set_stages(config, new)
        if self.variant.filled:
            relations.add_missing(new)
        return new

    def arguments(self, config: Any) -> dict[str, Any]:
        values = vars(config)
        arguments: dict[str, Any] = {}
        for name, default in _fields(config):
            value = values.get(name)
            if value is None and name in relations.OPEN:
                arguments[name] = relations.OPEN[name]
                continue
            if default is None and not self.variant.derived and not _is_given(value):
                continue
            new = self.shrunk(name, value)
            if new is not value or (value is not None and not _same(value, default)):
                arguments[name] = new
        for (model_type, name), (value, _) in OVERRIDES.items():
            if model_type == config.model_type:
                arguments[name] = value
        relations.agree(config, arguments)
        if self.variant.filled:
            relations.fill(config, arguments, self.layers)
        return arguments

    def shrunk(self, name: str, value: Value) -> Value:
        if _is_config(value):
            return self.shrink(value)
        if isinstance(value, bool) or value is None or name in ("id2label", "label2id"):
            return value
        if _is_token(name, value):
            return self.tokens[value]
        if name == "mode" and value == "inference":
            return "train"
        if isinstance(value, float):
            return 0.0 if RANDOM.search(name) else value
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
        if RANDOM.search(name) and not re.search(r"length|masks", name):
            return 0
        if value in self.old_layers and _is_layer_count(name):
            return self.layers
        for pattern, rule in COMPILED:
            if pattern.search(name):
                return self.by_rule(rule, value)
        return value

    def by_rule(self, rule: Rule, value: int) -> int:
        if rule is key_value_heads and not (self.grouped and self.variant.grouped):
            rule = heads
        if rule in WIDTHS:
            if not self.variant.widths:
                return value
            if self.variant.scaled:
                divides = value % self.factor == 0
                return value // self.factor if divides else value
            return min(value, rule(value) * self.variant.times)
        if rule in COUNTS_OF_HEADS and (self.variant.scaled or not self.variant.widths):
            return value
        if rule is at_most_layers:
            return min(value, self.variant.layers)
        if rule in (side, patch):
            return min(value, rule(value) * self.variant.pictures)
        return rule(value)

    def indices(self, items: list[int]) -> list[int]:
        """Returns as many indices, all different, and none behind the last layer."""
        if not self.old_layers or max(items, default=0) < self.layers:
            return items
        return list(range(max(0, self.layers - len(items)), self.layers))

    def sequence(self, name: str, value: Any) -> Any:
        items = list(value)
        if len(items) in self.old_layers and len(items) > self.layers:
            # The first of each kind, then a second of each, then the others.
            order = sorted(range(len(items)), key=lambda i: min(items[:i].count(items[i]), 2))
            items = [items[i] for i in sorted(order[: self.layers])]
        if len(items) > 1 and name.endswith("_feature_layer"):
            items = list(range(-1, -1 - len(items), -1))  # of another configuration: from behind
        elif items and all(type(item) is int for item in items):
            if _is_indices(name, items) and (self.old_layers or name.endswith(_INDICES)):
                items = self.indices(items)
            elif _is_indices(name, items):  # of layers of another configuration
                items = [min(item, LAYERS) for item in items]
            else:
                items = [self.integer(name, item) for item in items]
        elif items and all(isinstance(item, float) for item in items):
            items = [self.shrunk(name, item) for item in items]
        elif items and all(isinstance(item, (list, tuple)) for item in items):
            items = [self.sequence(name, item) for item in items]
        return type(value)(items)


def _most_indices(config: Any) -> int:
    """Returns the length of the longest list of layers' indices, plus one."""
    lists = {n: list(v) for n, v in vars(config).items() if isinstance(v, (list, tuple))}
    named = [items for name, items in lists.items() if _is_indices(name, items)]
    return max((len(items) + 1 for items in named if 1 < len(items) < _MANY), default=0)


def _is_indices(name: str, items: list[Any]) -> bool:
    """Returns whether a list has numbers of layers: growing ones, if the name leaves that open."""
    if name.endswith(_INDICES):
        return True
    if not re.search(r"(^|_)(layers|blocks)$", name) or "num" in name:
        return False
    numbers = all(type(item) is int for item in items)
    return numbers and len(items) > 1 and all(a < b for a, b in itertools.pairwise(items))


def _is_grouped(config: Any) -> bool:
    """Returns whether there are fewer heads of keys than of queries."""
    values = vars(config)
    count = next((values[n] for n in HEAD_COUNTS if isinstance(values.get(n), int)), None)
    groups = values.get("num_key_value_heads")
    return count is None or groups is None or groups < count


_INDICES = ("indices", "indexes", "idxs", "idx")
_MANY = 6  # indices: all layers, not some of them


def _factor(config: Any) -> int:
    """Returns the divisor of widths: heads become as wide as `HEAD_DIM`."""
    values = vars(config)
    width = next((values[n] for n in ("head_dim", "d_kv", "d_head") if values.get(n)), None)
    if width is None:
        hidden = next((values[n] for n in HIDDEN if isinstance(values.get(n), int)), 0)
        count = next((values[n] for n in HEAD_COUNTS if isinstance(values.get(n), int)), 0)
        width = hidden // count if count else hidden // 4
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
    counts = [getattr(config, n, None) for n in vars(config) if _is_layer_count(n)]
    return {count for count in counts if isinstance(count, int) and count > LAYERS}


def _most_kinds(config: Any, old_layers: set[int]) -> int:
    """Counts the kinds of layers of the configuration, four at most."""
    most = 0
    for value in vars(config).values():
        if isinstance(value, (list, tuple)) and len(value) in old_layers:
            if all(isinstance(item, (str, bool)) for item in value):
                most = max(most, len(set(value)))
    return min(most, 4)
