"""Inputs that give a loss, made from the signature of ``forward`` and the configuration.

`find_recipe` tries a few kinds of main inputs (a picture may come as a grid of pixels, as one of
several, or as patches) with a few kinds of targets, and takes the first with which the model in
one process gives a loss and gradients. A model that gives no loss of its own gets one from its
outputs.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.configs import FIRST_WORD, nested

BATCH = 2  # samples of a microbatch
SEQUENCE = 8
CLASSES = 2
FRAMES = 64
SAMPLES = 1600

Inputs = dict[str, Any]
Maker = Callable[["Source"], Any]


class NoRecipe(RuntimeError):
    """Nothing that was tried gave a loss."""


class Source:
    """Random values of one microbatch for one model."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, seed: int) -> None:
        self.model = model
        self.config: Any = model.config
        self.dtype = dtype
        self.parameters = inspect.signature(model.forward).parameters
        self.generator = torch.Generator().manual_seed(seed)

    def setting(self, *names: str, default: Any = None) -> Any:
        """The first of these fields that the configuration or a nested one has."""
        for name in names:
            for config in _all_configs(self.config):
                value = getattr(config, name, None)
                if value is not None:
                    return value
        return default

    def number(self, *names: str, default: int) -> int:
        value = self.setting(*names, default=default)
        return int(value[0] if isinstance(value, (list, tuple)) else value)

    def real(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator)

    def words(self, *shape: int) -> Tensor:
        size = self.number("vocab_size", default=99)
        return self.integers(min(FIRST_WORD, size // 2), size, *shape)

    def takes(self, name: str) -> bool:
        return name in self.parameters

    @property
    def channels(self) -> int:
        return self.number("num_channels", "in_channels", "in_chans", default=3)

    @property
    def sides(self) -> tuple[int, int]:
        value = self.setting("image_size", "img_size", "crop_size", "resolution", default=32)
        if isinstance(value, dict):
            value = [value["height"], value["width"]]
        sides = list(value) if isinstance(value, (list, tuple)) else [value, value]
        return int(sides[0]), int(sides[-1])


def _all_configs(config: Any) -> Iterator[Any]:
    yield config
    for inner in nested(config).values():
        yield from _all_configs(inner)


# ---- main inputs -----------------------------------------------------------


def _text(source: Source) -> Inputs:
    inputs: Inputs = {}
    shape = (BATCH, SEQUENCE)
    if "MultipleChoice" in type(source.model).__name__:
        shape = (BATCH, 2, SEQUENCE)  # type: ignore[assignment]
    if source.takes("input_ids"):
        inputs["input_ids"] = source.words(*shape)
    if source.takes("attention_mask"):
        inputs["attention_mask"] = torch.ones(*shape, dtype=torch.long)
    if source.takes("bbox"):
        corners = source.integers(0, 30, *shape, 4).sort(-1).values
        inputs["bbox"] = corners
    return inputs


def _with_decoder(source: Source, inputs: Inputs) -> Inputs:
    if source.takes("decoder_input_ids"):
        inputs["decoder_input_ids"] = source.words(BATCH, SEQUENCE)
    return inputs


def _pixels(source: Source) -> Inputs:
    return {"pixel_values": source.real(BATCH, source.channels, *source.sides)}


def _frames(source: Source) -> Inputs:
    frames = source.number("num_frames", "frames_per_clip", default=2)
    name = "pixel_values_videos" if source.takes("pixel_values_videos") else "pixel_values"
    return {name: source.real(BATCH, frames, source.channels, *source.sides)}


def _tiles(source: Source) -> Inputs:
    """One picture for each sample, as the first of several."""
    height, width = source.sides
    inputs = {"pixel_values": source.real(BATCH, 1, source.channels, height, width)}
    if source.takes("image_sizes"):
        inputs["image_sizes"] = torch.tensor([[height, width]] * BATCH)
    return inputs


def _sized_pixels(source: Source) -> Inputs:
    height, width = source.sides
    return _pixels(source) | {"image_sizes": torch.tensor([[height, width]] * BATCH)}


def _patches(source: Source) -> Inputs:
    """One row for each patch of all pictures, and the grids of the pictures."""
    side = 4
    patch = source.number("patch_size", default=8)
    depth = source.number("temporal_patch_size", default=1)
    width = source.channels * depth * patch * patch
    inputs: Inputs = {"pixel_values": source.real(BATCH * side * side, width)}
    for name, grid in (("image_grid_thw", [1, side, side]), ("image_grid_hw", [side, side])):
        if source.takes(name):
            inputs[name] = torch.tensor([grid] * BATCH)
    return inputs


def _features(source: Source, last: bool = False) -> Inputs:
    bins = source.number("num_mel_bins", "feature_size", "input_feat_per_channel", default=32)
    shape = (BATCH, FRAMES, bins) if last else (BATCH, bins, FRAMES)
    return {"input_features": source.real(*shape)}


def _features_last(source: Source) -> Inputs:
    return _features(source, last=True)


def _wave(source: Source) -> Inputs:
    return {"input_values": source.real(BATCH, SAMPLES)}


def _spectrogram(source: Source) -> Inputs:
    bins = source.number("num_mel_bins", default=32)
    return {"input_values": source.real(BATCH, source.number("max_length", default=64), bins)}


def _wave_channel(source: Source) -> Inputs:
    return {"input_values": source.real(BATCH, 1, SAMPLES)}


def _series(source: Source) -> Inputs:
    lags = max(source.setting("lags_sequence", default=[0]))
    length = source.number("context_length", default=16) + lags
    ahead = source.number("prediction_length", default=4)
    times = source.number("num_time_features", default=1)
    channels = source.number("num_input_channels", default=1)
    shape = (BATCH, length, channels) if source.setting("num_input_channels") else (BATCH, length)
    future = (BATCH, ahead, *shape[2:])
    all_values: Inputs = {
        "past_values": source.real(*shape),
        "past_time_features": source.real(BATCH, length, times),
        "past_observed_mask": torch.ones(*shape),
        "future_values": source.real(*future),
        "future_time_features": source.real(BATCH, ahead, times),
        "static_categorical_features": torch.zeros(BATCH, 1, dtype=torch.long),
    }
    return {name: value for name, value in all_values.items() if source.takes(name)}


def _plain_pixels_and_text(source: Source) -> Inputs:
    return _pixels(source) | _text(source)


def _tokens_of(source: Source, kind: str) -> int | None:
    names = [f"{kind}_token_id", f"{kind}_token_index"]
    value: int | None = source.setting(*names)
    return value


def _with_places(kind: str, makers: tuple[Maker, ...]) -> Maker:
    """Text in which tokens stand where the features of pictures or sounds go."""

    def make(source: Source) -> Inputs:
        method = getattr(source.model, f"get_{kind}_features", None) or getattr(
            getattr(source.model, "model", None), f"get_{kind}_features", None
        )
        token = _tokens_of(source, kind)
        if method is None or token is None:
            raise NoRecipe(f"no {kind} features")
        for maker in makers:
            media = maker(source)
            if not all(source.takes(name) for name in media):
                continue
            taken = inspect.signature(method).parameters
            try:
                with torch.no_grad():
                    features = method(**{n: v for n, v in media.items() if n in taken})
                count = _count_rows(features) // BATCH
            except Exception:
                continue
            return _text_with(source, media, token, count)
        raise NoRecipe(f"no kind of {kind} fits")

    return make


def _text_with(source: Source, media: Inputs, token: int, count: int) -> Inputs:
    text = _text(source)
    places = torch.full((BATCH, count), token)
    words = text["input_ids"]
    text["input_ids"] = torch.cat([words[:, :1], places, words[:, 1:]], dim=1)
    text["attention_mask"] = torch.ones_like(text["input_ids"])
    if source.takes("mm_token_type_ids"):
        text["mm_token_type_ids"] = (text["input_ids"] == token).long()
    if source.takes("token_type_ids"):
        text["token_type_ids"] = (text["input_ids"] == token).long()
    return {name: value for name, value in (text | media).items() if source.takes(name)}


def _count_rows(features: Any) -> int:
    """Vectors in what a model makes of pictures."""
    pooled = getattr(features, "pooler_output", None)
    if pooled is not None:
        features = pooled
    elif hasattr(features, "last_hidden_state"):
        features = features.last_hidden_state
    if isinstance(features, (list, tuple)):
        return sum(_count_rows(item) for item in features)
    return features.numel() // features.shape[-1]


_IMAGES = (_patches, _sized_pixels, _pixels, _tiles)
_SOUNDS = (_features, _features_last, _wave, _wave_channel)


def _main_inputs(source: Source) -> Iterator[Inputs]:
    """Kinds of main inputs, the most telling first."""
    makers: list[Maker] = []
    if source.takes("past_values"):
        makers.append(_series)
    if source.takes("input_ids") and source.takes("pixel_values"):
        makers += [_with_places("image", _IMAGES), _plain_pixels_and_text]
        makers += [lambda s: _frames(s) | _text(s), lambda s: _tiles(s) | _text(s)]
    if source.takes("input_ids"):
        for name, kinds in (("input_features", _SOUNDS[:2]), ("input_values", _SOUNDS[2:])):
            if source.takes(name):
                makers.append(_with_places("audio", kinds))
                makers += [lambda s, k=kind: k(s) | _text(s) for kind in kinds]
    if source.takes("pixel_values") or source.takes("pixel_values_videos"):
        makers += [_pixels, _frames, _sized_pixels]
    if source.takes("input_features"):
        makers += [_features, _features_last]
    if source.takes("input_values"):
        makers += [_wave, _wave_channel, _spectrogram]
    if source.takes("input_ids"):
        makers.append(_text)
    if source.takes("inputs"):
        makers.append(lambda s: {"inputs": s.words(BATCH, SEQUENCE)})
    for maker in makers:
        try:
            inputs = maker(source)
        except NoRecipe:
            continue
        if not all(source.takes(name) for name in inputs):
            inputs = {name: value for name, value in inputs.items() if source.takes(name)}
        yield _with_decoder(source, inputs)


# ---- targets ---------------------------------------------------------------


def _next_words(source: Source, inputs: Inputs) -> Any:
    ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if ids is None or ids.dim() != 2:
        return source.words(BATCH, SEQUENCE)
    return torch.where(ids >= FIRST_WORD, ids, -100) if bool((ids >= FIRST_WORD).any()) else ids


def _class(source: Source, inputs: Inputs) -> Tensor:
    return source.integers(0, CLASSES, BATCH)


def _class_per_word(source: Source, inputs: Inputs) -> Tensor:
    return source.integers(0, CLASSES, BATCH, _length(inputs))


def _class_per_pixel(source: Source, inputs: Inputs) -> Tensor:
    return source.integers(0, CLASSES, BATCH, *source.sides)


def _real_per_pixel(source: Source, inputs: Inputs) -> Tensor:
    return source.real(BATCH, *source.sides).abs()


def _sound_words(source: Source, inputs: Inputs) -> Tensor:
    return source.integers(1, min(20, source.number("vocab_size", default=20)), BATCH, 2)


def _boxes(source: Source, inputs: Inputs) -> list[dict[str, Tensor]]:
    boxes = torch.tensor([[0.5, 0.5, 0.3, 0.4], [0.3, 0.6, 0.2, 0.2]], dtype=source.dtype)
    return [
        {
            "class_labels": source.integers(0, CLASSES, 2),
            "boxes": boxes.clone(),
            "masks": (source.real(2, *source.sides) > 0).to(source.dtype),
        }
        for _ in range(BATCH)
    ]


def _picture(source: Source, inputs: Inputs) -> Tensor:
    value: Tensor = inputs["pixel_values"]
    return value.clone()


def _real_vector(source: Source, inputs: Inputs) -> Tensor:
    return source.real(BATCH, CLASSES)


def _length(inputs: Inputs) -> int:
    ids = inputs.get("input_ids", inputs.get("decoder_input_ids"))
    return SEQUENCE if ids is None else int(ids.shape[-1])


# By the end of the class name: what labels are tried first.
_BY_NAME: tuple[tuple[str, Any], ...] = (
    ("SequenceClassification", _class), ("ImageClassification", _class),
    ("VideoClassification", _class),
    ("AudioClassification", _class), ("NextSentencePrediction", _class), ("MultipleChoice", _class),
    ("TokenClassification", _class_per_word), ("FrameClassification", _class_per_word),
    ("SemanticSegmentation", _class_per_pixel), ("ObjectDetection", _boxes),
    ("Segmentation", _boxes),
    ("DepthEstimation", _real_per_pixel), ("CTC", _sound_words), ("RNNT", _sound_words),
    ("TDT", _sound_words), ("SuperResolution", _picture), ("ImageMatting", _picture),
    ("XVector", _class),
)  # fmt: skip
_LABELS = (
    _next_words, _class, _class_per_word, _class_per_pixel, _real_per_pixel, _boxes, _sound_words,
    _real_vector,
)  # fmt: skip


def _targets(source: Source, inputs: Inputs) -> Iterator[Inputs]:
    """Kinds of targets, the likeliest first, at last none."""
    name = type(source.model).__name__
    if source.takes("start_positions"):
        yield {
            "start_positions": source.integers(0, SEQUENCE, BATCH),
            "end_positions": source.integers(0, SEQUENCE, BATCH),
        }
    if source.takes("return_loss"):
        yield {"return_loss": True}
    if source.takes("next_sentence_label") and source.takes("labels"):
        words = _next_words(source, inputs)
        yield {"labels": words, "next_sentence_label": _class(source, inputs)}
    if source.takes("sentence_order_label"):
        words = _next_words(source, inputs)
        yield {"labels": words, "sentence_order_label": _class(source, inputs)}
    if source.takes("bool_masked_pos"):
        count = _patch_count(source)
        yield {"bool_masked_pos": source.integers(0, 2, BATCH, count).bool()}
    if source.takes("mask_labels") and source.takes("class_labels"):
        items = _boxes(source, inputs)
        yield {
            "mask_labels": [item["masks"] for item in items],
            "class_labels": [item["class_labels"] for item in items],
        }
    if source.takes("labels"):
        first = [maker for ending, maker in _BY_NAME if name.endswith(ending)]
        for maker in dict.fromkeys([*first, *_LABELS]):
            yield {"labels": maker(source, inputs)}
    yield {}


def _patch_count(source: Source) -> int:
    height, width = source.sides
    patch = source.number("patch_size", default=8)
    frames = source.number("num_frames", default=1) if source.setting("tubelet_size") else 1
    tubes = max(1, frames // source.number("tubelet_size", default=1))
    return tubes * (height // patch) * (width // patch)


# ---- the loss --------------------------------------------------------------


def loss_of(output: Any, own: bool, everything: bool) -> Tensor:
    """The loss to train with.

    Args:
        output: of the model.
        own: whether the model gives a loss.
        everything: whether all other outputs count as well.
    """
    terms: list[Tensor] = []
    if own:
        loss = _own_loss(output)
        assert loss is not None
        terms.append(loss)
    if everything or not own:
        tensors = [t for t in tensors_in(output) if t.dim() > 0]
        terms += [0.1 * _mean_square(tensor) for tensor in tensors]
    if not terms:
        raise NoRecipe("no output has a gradient")
    return torch.stack([term.to(terms[0].dtype) for term in terms]).sum()


def _mean_square(tensor: Tensor) -> Tensor:
    """Of the finite part: masks of attention are outputs of some models."""
    kept = torch.where(tensor.detach().abs() < 1e3, tensor, torch.zeros_like(tensor))
    return (kept * kept).mean()


def _own_loss(output: Any) -> Tensor | None:
    loss = output if isinstance(output, Tensor) else None
    if loss is None and hasattr(output, "keys"):
        loss = output["loss"] if "loss" in output else None
        if loss is None:
            loss = next((output[name] for name in output if name.endswith("loss")), None)
    elif isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(())
    return None


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor of real numbers in an output, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() and value.numel() else []
    if hasattr(value, "keys") and hasattr(value, "values"):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


# ---- recipes ---------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """Which of the kinds of inputs a model takes.

    Attributes:
        main, target: numbers in `_main_inputs` and `_targets`.
        own_loss: whether the model gives a loss.
    """

    main: int
    target: int
    own_loss: bool

    def inputs(self, model: nn.Module, dtype: torch.dtype, seed: int) -> Inputs:
        """One microbatch."""
        source = Source(model, dtype, seed)
        main = _nth(_main_inputs(source), self.main)
        return main | _nth(_targets(source, main), self.target)


@dataclass(frozen=True)
class PatternRecipe:
    """What all patterns take."""

    own_loss: bool = True

    def inputs(self, model: nn.Module, dtype: torch.dtype, seed: int) -> Inputs:
        from tests.zoo.patterns import inputs_of

        return inputs_of(torch.Generator().manual_seed(seed), dtype)


def _nth(values: Iterator[Inputs], number: int) -> Inputs:
    return next(itertools.islice(values, number, None))


def find_recipe(model: nn.Module, dtype: torch.dtype, seed: int) -> Recipe:
    """The first kinds of inputs with which the model gives a loss and gradients."""
    errors: list[str] = []
    fallback: Recipe | None = None
    for main, inputs in enumerate(_main_inputs(Source(model, dtype, seed))):
        kinds = list(_targets(Source(model, dtype, seed), inputs))
        # What does not run without targets hardly runs with others than the likeliest.
        runs = _runs(model, dtype, seed, Recipe(main, len(kinds) - 1, False))
        for target in range(len(kinds) if runs else 1):
            for own in (True, False):
                if fallback is not None and not own:
                    continue
                recipe = Recipe(main, target, own)
                try:
                    _try(model, dtype, seed, recipe)
                except Exception as error:
                    errors.append(f"{main}.{target}: {type(error).__name__}: {str(error)[:150]}")
                    continue
                if own:
                    return recipe
                fallback = recipe
        if fallback is not None:
            return fallback
    raise NoRecipe(
        "; ".join(dict.fromkeys([*errors[:2], *errors[-2:]])) or "no kind of inputs fits"
    )


def _runs(model: nn.Module, dtype: torch.dtype, seed: int, recipe: Recipe) -> bool:
    try:
        with torch.no_grad():
            model(**recipe.inputs(model, dtype, seed))
    except Exception:  # models raise what they like
        return False
    return True


def _try(model: nn.Module, dtype: torch.dtype, seed: int, recipe: Recipe) -> None:
    inputs = recipe.inputs(model, dtype, seed)
    output = model(**inputs)
    if recipe.own_loss and _own_loss(output) is None:
        raise NoRecipe("no loss among the outputs")
    loss = loss_of(output, recipe.own_loss, everything=False)
    if not bool(torch.isfinite(loss)):
        raise NoRecipe("the loss is not finite")
    try:
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if not grads or not any(bool(g.abs().max() > 0) for g in grads if g.numel()):
            raise NoRecipe("no gradient")
        if not all(bool(torch.isfinite(g).all()) for g in grads):
            raise NoRecipe("a gradient is not finite")
    finally:
        model.zero_grad(set_to_none=True)
