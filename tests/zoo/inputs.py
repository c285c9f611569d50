"""Main inputs, made from the signature of ``forward`` and the configuration.

`main_inputs` has a few kinds (a picture may come as a grid of pixels, as one of several, or as
patches), the most telling first; `tests.zoo.recipes` tries them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.zoo.named import with_named
from tests.zoo.source import BATCH, FRAMES, SAMPLES, SEQUENCE, Inputs, NoRecipe, Source

Maker = Callable[[Source], Any]


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
        shape: tuple[int, ...] = (BATCH, SEQUENCE)
        channels = _decoder_channels(source)
        if channels is not None:
            shape = (*shape, channels)
        inputs["decoder_input_ids"] = source.words(*shape)
    return inputs


def _decoder_channels(source: Source) -> int | None:
    """Returns how many words a decoder of sounds takes at once."""
    decoder = getattr(source.config, "decoder_config", None)
    count: int | None = getattr(decoder, "num_channels", None)
    return count


def _pixels(source: Source) -> Inputs:
    return {"pixel_values": source.real(BATCH, source.channels, *source.sides)}


def _frames(source: Source) -> Inputs:
    frames = source.number("num_frames", "frames_per_clip", default=2)
    name = "pixel_values_videos" if source.takes("pixel_values_videos") else "pixel_values"
    return {name: source.real(BATCH, frames, source.channels, *source.sides)}


def _tiles(source: Source) -> Inputs:
    """Makes one picture for each sample, as the first of several."""
    height, width = source.sides
    inputs = {"pixel_values": source.real(BATCH, 1, source.channels, height, width)}
    if source.takes("image_sizes"):
        inputs["image_sizes"] = torch.tensor([[height, width]] * BATCH)
    return inputs


def _sized_pixels(source: Source) -> Inputs:
    height, width = source.sides
    return _pixels(source) | {"image_sizes": torch.tensor([[height, width]] * BATCH)}


def _patches(source: Source) -> Inputs:
    """Makes one row for each patch of all pictures, and the grids of the pictures."""
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


def _long_wave(source: Source) -> Inputs:
    return {"input_values": source.real(BATCH, 1, 8 * SAMPLES)}


def _features_channel(source: Source) -> Inputs:
    """A spectrogram as a picture with one channel."""
    bins = source.number("num_mel_bins", default=32)
    frames = source.number("spec_size", default=FRAMES)
    return {"input_features": source.real(BATCH, 1, frames, bins)}


def _features_wide(source: Source) -> Inputs:
    """Several frames in one, as wide as the model's first layer takes them."""
    first = next((m for m in source.model.modules() if isinstance(m, nn.Linear)), None)
    if first is None:
        raise NoRecipe("no layer tells the width")
    return {"input_features": source.real(BATCH, FRAMES, first.in_features)}


def _flattened(source: Source) -> Inputs:
    """Patches, each after its row and its column."""
    width = source.channels * source.number("patch_size", default=8) ** 2
    width = source.number("patch_embed_hidden_size", default=width)
    places = torch.tensor([[row, column] for row in (1, 2) for column in (1, 2)])
    patches = source.real(BATCH, len(places), width)
    inputs = torch.cat([places.expand(BATCH, -1, -1).to(patches.dtype), patches], dim=-1)
    return {
        "flattened_patches": inputs,
        "attention_mask": torch.ones(BATCH, len(places), dtype=torch.long),
    }


def _rows(source: Source) -> Inputs:
    """Makes one row for each patch of a picture, with a mask and the grid of patches."""
    side, patch = 2, source.number("patch_size", default=8)
    count = source.number("num_patches", default=side * side)
    mask = torch.zeros(BATCH, count, dtype=torch.long)
    mask[:, : side * side] = 1
    return {
        "pixel_values": source.real(BATCH, count, source.channels * patch * patch),
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[side, side]] * BATCH),
    }


def _half_pixels(source: Source) -> Inputs:
    """The lower half of a picture; its prompt is the upper one."""
    height, width = source.sides
    return {"pixel_values": source.real(BATCH, source.channels, height // 2, width)}


def _codebooks(source: Source) -> int:
    count: int | None = source.setting("num_codebooks")
    if count is None:
        raise NoRecipe("no codebooks")
    return count


def _codes_in_rows(source: Source) -> Inputs:
    """Codes of sounds: the words of each codebook are a row."""
    ids = source.words(BATCH * _codebooks(source), SEQUENCE)
    return _text(source) | {"input_ids": ids}


def _codes_last(source: Source) -> Inputs:
    """The same with the codebooks as the last axis, after the text."""
    ids = source.words(BATCH, SEQUENCE, _codebooks(source) + 1)
    return _text(source) | {"input_ids": ids}


def _text_with_fractions(source: Source) -> Inputs:
    """Text with boxes in fractions of the page."""
    media = _pixels(source) if source.takes("pixel_values") else {}
    text = _text(source)
    return media | text | {"bbox": text["bbox"].to(source.dtype) / 32}


def _vectors(source: Source) -> Inputs:
    """Makes vectors that take the place of words."""
    width = source.number("hidden_size", default=32)
    inputs = {"inputs_embeds": source.real(BATCH, SEQUENCE, width)}
    if source.takes("attention_mask"):
        inputs["attention_mask"] = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
    return inputs


def _series(source: Source) -> Inputs:
    lags = max(source.setting("lags_sequence", default=[0]))
    length = source.number("context_length", default=16) + lags
    ahead = source.number("prediction_length", "horizon_length", default=4)
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
    }
    if source.setting("num_static_categorical_features") != 0:
        all_values["static_categorical_features"] = torch.zeros(BATCH, 1, dtype=torch.long)
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


def main_inputs(source: Source) -> Iterator[Inputs]:
    """Kinds of main inputs, the most telling first; then the same with all that a name tells."""
    for optional in (False, True):
        for maker in _makers(source):
            try:
                plain = maker(source)
                inputs = with_named(source, plain, optional)
            except (NoRecipe, KeyError):
                continue
            if optional and len(inputs) == len(plain):
                continue
            inputs = {name: value for name, value in inputs.items() if source.takes(name)}
            yield _with_decoder(source, inputs)


def _makers(source: Source) -> list[Maker]:
    makers: list[Maker] = []
    if source.takes("past_values"):
        makers.append(_series)
    if source.takes("flattened_patches"):
        makers.append(_flattened)
    if source.takes("input_ids") and source.takes("pixel_values"):
        makers += [_with_places("image", _IMAGES), _plain_pixels_and_text]
        makers += [lambda s: _frames(s) | _text(s), lambda s: _tiles(s) | _text(s)]
        makers.append(_with_places("video", (_frames,)))
    if source.takes("input_ids"):
        makers += _sounds_and_text(source)
    if source.takes("input_ids") and source.takes("pixel_values_videos"):
        makers.append(lambda s: _frames(s) | _text(s))
    if source.takes("pixel_values") or source.takes("pixel_values_videos"):
        makers += [_pixels, _frames, _sized_pixels]
    if source.takes("spatial_shapes"):
        makers.append(_rows)
    if source.takes("prompt_pixel_values"):
        makers.append(_half_pixels)
    if source.takes("input_features"):
        makers += [_features, _features_last, _features_wide]
    if source.takes("input_values"):
        makers += [_wave, _wave_channel, _spectrogram]
    if source.takes("input_ids"):
        makers += [_text, _codes_in_rows, _codes_last]
        if source.takes("bbox"):
            makers.append(_text_with_fractions)
    if source.takes("inputs_embeds"):
        makers.append(_vectors)
    if source.takes("inputs"):
        makers.append(lambda s: {"inputs": s.words(BATCH, SEQUENCE)})
    return makers


def _sounds_and_text(source: Source) -> list[Maker]:
    makers: list[Maker] = []
    for name, kinds in (("input_features", _SOUNDS[:2]), ("input_values", _SOUNDS[2:])):
        if source.takes(name):
            makers.append(_with_places("audio", kinds))
            makers += [lambda s, k=kind: k(s) | _text(s) for kind in kinds]
    if source.takes("is_longer"):
        makers.append(lambda s: _features_channel(s) | _text(s))
    if source.takes("input_values"):
        makers.append(lambda s: _long_wave(s) | _text(s))
        if source.takes("pixel_values_videos"):
            makers.append(lambda s: _long_wave(s) | _frames(s) | _text(s))
    return makers
