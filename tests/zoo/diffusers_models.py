"""Models of diffusers, one of each module, made tiny by rule from their constructor's arguments.

Every width becomes `WIDTH`, which is `HEADS` heads of `HEAD_DIM`, so texts, captions and pooled
vectors all have as many numbers; lists of widths keep their length. Inputs follow from the names in
the signature of ``forward``; `_FORMS` has the forms that the main one may have.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.catalogue import Entry
from tests.zoo.recipes import tensors_in
from tests.zoo.rules import LAYERS
from tests.zoo.shrinking import (
    keep_few_of_equal_layers,
    size_of,
    squares,
    without_randomness,
    without_values,
)
from tests.zoo.source import BATCH, Inputs, NoRecipe

PATIENCE_S = 12.0
LARGEST = 15_000_000  # parameters
WIDTH, HEADS, HEAD_DIM = 32, 2, 16
WORDS = 6  # of a text
SIDE = 8  # of latent pictures
FRAMES = 5
GROUPS = 4  # of a group norm
_MANY = 24  # larger numbers are widths


@dataclass(frozen=True)
class Choice:
    """A way to make a model small.

    Attributes:
        variant: name of the rules, see `arguments`.
    """

    variant: str = "equal"


def diffusers_entries() -> list[Entry]:
    """The first model of each module."""
    import diffusers.models
    from diffusers import ModelMixin

    diffusers.utils.logging.set_verbosity_error()

    root = Path(diffusers.models.__path__[0])
    found = []
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        module_name = ".".join(["diffusers.models", *parts])
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # packages that are not installed
            continue
        names = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, ModelMixin)
            and value.__module__ == module_name and "forward" in vars(value)
        ]  # fmt: skip
        if names:
            found.append(Entry("diffusers", ".".join(parts), module_name, names[0]))
    return found


# ---- constructors ----------------------------------------------------------


def _to(target: int) -> Callable[[int], int]:
    return lambda value: target if value > target else value


def _keep(value: int) -> int:
    return value


def _doubling(value: int) -> int:
    """Shrinks the widths in a list, not all to the same, so that a mix-up is an error."""
    return WIDTH if value <= 128 else 2 * WIDTH


# The first pattern that matches a name decides.
_RULES: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r"compression|_ratio|scale|factor|theta|kernel|stride|padding|rate|_freq|max_pos|eps$", _keep),
    (r"num_train|num_embeds|type_vocab|^num_class|max_period", _keep),
    (r"hop|mel|offset|_every|interval", _keep),
    (r"vocab", _to(99)),
    (r"sample_frames|num_frames|video_length", _to(FRAMES)),
    (r"groups", _to(GROUPS)),
    (r"layers|depth|n_blocks|num_blocks|num_res|blocks$|num_.*_blocks|repeat", _to(LAYERS)),
    (r"heads$", _to(HEADS)),
    (r"head_dim|head_size|^d_kv$", _to(HEAD_DIM)),
    (r"sample_(size|height|width)|^(resolution|image_size|height|width|base_size)$", _to(SIDE)),
    (r"^(in|out|latent|z|input|conditioning|audio_in|audio_out|num|io)_?(channels|dim)$", _to(16)),
    (r"max_.*length|_len$|seq_len|max_size|max_seq|pos_embed", _keep),
    (r"experts", _to(4)),
    (r"block_out_channels|^channels$|block_channels|out_channels$", _doubling),
    (r"hidden|dim|width|size|channels|features|embed|feat|proj|^d_", _to(WIDTH)),
)  # fmt: skip
_AXES = re.compile(r"axes_dim|rope_dim|rope_axes_dim|axes_dims|rope_dims")
# For arguments whose default is None, or that have none.
_MISSING: dict[str, Any] = {
    "in_channels": 4, "out_channels": 4, "latent_channels": 4, "num_kv_heads": HEADS,
    "block_out_channels": (WIDTH, 2 * WIDTH), "layers_per_block": 1,
    "spatial_compression_ratio": 2, "temporal_compression_ratio": 2,
}  # fmt: skip


def _shrunk(name: str, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        if _AXES.search(name) and all(type(item) is int for item in value):
            return type(value)(_axes(len(value)))
        return type(value)(_shrunk(name, item) for item in value)
    if type(value) is not int or value <= 0:
        return value
    for pattern, rule in _RULES:
        if re.search(pattern, name):
            return rule(value)
    return value


def _axes(count: int) -> list[int]:
    """Even numbers that make `HEAD_DIM` together."""
    each = HEAD_DIM // count // 2 * 2
    return [HEAD_DIM - each * (count - 1), *[each] * (count - 1)]


def arguments(cls: Any, variant: str) -> dict[str, Any]:
    """The defaults, made small.

    Args:
        cls: the model's class.
        variant: "equal" for two heads of 16 everywhere, "patched" with a size of patches for
            models whose default has none, and "given" leaves the heads' width alone.
    """
    result = {}
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if name == "self" or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        value = _shrunk(name, default)
        if value is None and (default is not parameter.default or name != "out_channels"):
            value = _MISSING.get(name)
        if value is None and variant == "patched" and name == "patch_size":
            value = 2
        if value is None and default is not parameter.default:
            raise NoRecipe(f"{name} has no default")
        if variant == "given" and ("head" in name or _AXES.search(name)):
            continue
        if value != parameter.default:
            result[name] = value
    return result


def build(entry: Entry, choice: Choice) -> nn.Module:
    cls = entry.load()
    given = {} if choice.variant == "default" else arguments(cls, choice.variant)
    model: nn.Module = cls(**given)
    if choice.variant == "default":
        keep_few_of_equal_layers(model)
    without_randomness(model)
    return model


# ---- inputs ----------------------------------------------------------------


class Source:
    """Random values for one microbatch."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, seed: int) -> None:
        self.config: dict[str, Any] = dict(getattr(model, "config", {}))
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def real(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def number(self, *names: str, default: int) -> int:
        for name in names:
            value = self.config.get(name)
            if isinstance(value, (list, tuple)) and value:
                value = value[0]
            if type(value) is int:
                return value
        return default

    @property
    def channels(self) -> int:
        names = ("in_channels", "input_channels", "num_channels", "channels", "in_visual_dim")
        return self.number(*names, "io_channels", "out_channels", default=4)

    @property
    def side(self) -> int:
        return max(SIDE, self.number("sample_size", "sample_height", "resolution", default=SIDE))


_FORMS: dict[str, Callable[[Source], Tensor]] = {
    "picture": lambda s: s.real(BATCH, s.channels, s.side, s.side),
    "words": lambda s: s.real(BATCH, 16, s.channels),
    "video": lambda s: s.real(BATCH, s.channels, FRAMES, s.side, s.side),
    "frames": lambda s: s.real(BATCH, FRAMES, s.channels, s.side, s.side),
    "wave": lambda s: s.real(BATCH, s.channels, 64),
    "large picture": lambda s: s.real(BATCH, s.channels, 4 * s.side, 4 * s.side),
    "large video": lambda s: s.real(BATCH, s.channels, FRAMES, 4 * s.side, 4 * s.side),
    "long wave": lambda s: s.real(BATCH, s.channels, 4096),
    "wide words": lambda s: s.real(BATCH, 16, WIDTH),
}


def _text_width(source: Source) -> int:
    return source.number(
        "joint_attention_dim", "cross_attention_dim", "text_embed_dim", "text_dim",
        "caption_channels", "cap_feat_dim", "in_text_dim", "encoder_hid_dim",
        "condition_dim", "text_hidden_dim",
        default=WIDTH,
    )  # fmt: skip


def _grid(source: Source, rows: int, columns: int) -> Tensor:
    ids = torch.zeros(rows, columns, dtype=source.dtype)
    ids[:, -1] = torch.arange(rows)
    return ids


def _axis_count(source: Source) -> int:
    axes = next((v for k, v in source.config.items() if _AXES.search(k) and v), (1, 1, 1))
    return len(axes)


def _picture_sizes(source: Source) -> list[Any]:
    return [[(1, 4, 4)]] * BATCH


def _pairs(source: Source) -> Tensor:
    return torch.tensor([[SIDE, SIDE]] * BATCH, dtype=source.dtype)


# Arguments by their names, besides the main one; the first pattern that matches decides.
_ARGUMENTS: tuple[tuple[str, Callable[[Source], Any]], ...] = (
    (r"^(timesteps?|t|r_timestep|timestep_r|guidance|noise_level|sigma)$",
     lambda s: torch.linspace(0.2, 0.7, BATCH, dtype=s.dtype)),
    (r"image_rotary_emb|_kwargs|residual|kv_cache|controlnet_.*samples", lambda s: None),
    (r"img_shapes", _picture_sizes),
    (r"^img_ids$", lambda s: _grid(s, 16, _axis_count(s))),
    (r"^txt_ids$", lambda s: _grid(s, WORDS, _axis_count(s))),
    (r"txt_seq_lens", lambda s: [WORDS] * BATCH),
    (r"pooled|text_embeds$|^clip_text", lambda s: s.real(
        BATCH, s.number("pooled_projection_dim", "in_text_dim2", default=WIDTH))),
    (r"class_labels|^labels$", lambda s: torch.arange(BATCH)),
    (r"input_ids", lambda s: torch.randint(0, 90, (BATCH, WORDS), generator=s.generator)),
    (r"encoder_.*mask|text_.*mask|hidden_states_mask",
     lambda s: torch.ones(BATCH, WORDS, dtype=torch.bool)),
    (r"controlnet_cond|^conditioning$", lambda s: s.real(
        BATCH, s.number("conditioning_channels", default=3), 8 * s.side, 8 * s.side)),
    (r"conditioning_scale|fps|num_frames", lambda s: None),
    (r"encoder_hidden_states|cap_feats|prompt_embeds|text_|context|captions",
     lambda s: s.real(BATCH, WORDS, _text_width(s))),
    (r"size$|coords$", _pairs),
    (r"padding_mask", lambda s: torch.zeros(1, 1, s.side, s.side, dtype=s.dtype)),
)  # fmt: skip
# Optional ones that models need nevertheless.
_NEEDED = re.compile(
    r"encoder_hidden_states|timestep$|pooled|img_ids|txt_ids|img_shapes|class_labels"
    r"|encoder_attention_mask|encoder_hidden_states_mask|text_embeds"
)
_NOT_NEEDED = re.compile(r"image|controlnet|_2$|_t5|audio|temb")


@dataclass(frozen=True)
class DiffusersRecipe:
    """A recipe of inputs, with a form of the main input.

    Attributes:
        choice: way to make the model small.
        form: a key of `_FORMS`.
        needed: whether optional inputs that models tend to need are given.
        steps: whether time steps are whole numbers.
        alike: whether a picture that conditions has the form of the main input.
    """

    choice: Choice
    form: str
    needed: bool = True
    steps: bool = False
    alike: bool = False

    def inputs(self, model: nn.Module, dtype: torch.dtype, seed: int) -> Inputs:
        """Makes one microbatch."""
        source = Source(model, dtype, seed)
        parameters = list(inspect.signature(model.forward).parameters.values())
        result: Inputs = {parameters[0].name: _FORMS[self.form](source)}
        for parameter in parameters[1:]:
            name = parameter.name
            optional = parameter.default is not inspect.Parameter.empty
            if optional and not (
                self.needed and _NEEDED.search(name) and not _NOT_NEEDED.search(name)
            ):
                continue
            value = next((make(source) for p, make in _ARGUMENTS if re.search(p, name)), None)
            if value is not None:
                result[name] = value
        if self.alike and "controlnet_cond" in result:
            result["controlnet_cond"] = _FORMS[self.form](source)
        if self.steps and "timestep" in result:
            result["timestep"] = (result["timestep"] * 100).long()
        return result

    def loss(self, output: Any, everything: bool) -> Tensor:
        return squares(tensors_in(output))


def candidates(entry: Entry) -> Iterator[DiffusersRecipe]:
    """Ways to make and feed a model; the first that fits is taken.

    Raises:
        NoRecipe: no rule makes a small model.
    """
    start = time.monotonic()
    reasons = []
    for variant in ("equal", "patched", "given", "default"):
        choice = Choice(variant)
        try:
            size = size_of(without_values(functools.partial(build, entry, choice)))
        except Exception as error:  # constructors raise what they like
            reasons.append(f"{type(error).__name__}: {str(error)[:200]}")
            continue
        if size > LARGEST:
            reasons.append(f"{size} parameters")
            continue
        for form, needed, steps, alike in itertools.product(_FORMS, *[(True, False)] * 3):
            if time.monotonic() - start > PATIENCE_S:
                return
            yield DiffusersRecipe(choice, form, needed, not steps, not alike)
        return
    raise NoRecipe(" | ".join(dict.fromkeys(reasons)))
