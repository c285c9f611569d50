"""Targets that a model may take with its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.zoo.rules import FIRST_WORD
from tests.zoo.source import BATCH, CLASSES, SEQUENCE, Inputs, Source


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


def _spectrogram(source: Source, inputs: Inputs) -> Tensor:
    return source.real(BATCH, 16, source.number("num_mel_bins", default=32))


def _codes(source: Source, inputs: Inputs) -> Tensor:
    """A word of each codebook at each step."""
    ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    count = source.number("num_codebooks", "num_channels", default=1)
    if ids is not None and ids.dim() == 3:
        return source.words(BATCH * ids.shape[2], SEQUENCE)
    return source.words(BATCH, SEQUENCE, count)


def _span(source: Source, inputs: Inputs) -> Tensor:
    """Makes the label of a video: its length, and the start and end of a span."""
    return torch.tensor([[8.0, 1.0, 4.0]] * BATCH, dtype=source.dtype)


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
    _real_vector, _spectrogram, _codes, _span,
)  # fmt: skip


def targets(source: Source, inputs: Inputs) -> Iterator[Inputs]:
    """Kinds of targets, the likeliest first, at last none."""
    name = type(source.model).__name__
    if source.takes("question_positions"):
        yield {
            "question_positions": source.integers(0, SEQUENCE, BATCH, 1),
            "start_positions": source.integers(1, SEQUENCE, BATCH, 1),
            "end_positions": source.integers(1, SEQUENCE, BATCH, 1),
        }
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
        half = source.real(BATCH, count).argsort(-1) < count // 2  # as many of each sample
        yield {"bool_masked_pos": half}
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
