"""Arguments that only some models take, by their names.

`with_named` adds to main inputs what ``forward`` requires, and what it takes besides where the
main inputs alone do not run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.zoo.source import BATCH, SEQUENCE, Inputs, Source

REGIONS = 4  # of a picture
DOCUMENTS = 2

Named = Callable[[Source, Inputs], Any]


def _words(source: Source, inputs: Inputs) -> Tensor:
    return source.words(BATCH, SEQUENCE)


def _ones(source: Source, inputs: Inputs) -> Tensor:
    return torch.ones(BATCH, SEQUENCE, dtype=torch.long)


def _documents(source: Source) -> int:
    return source.number("n_docs", default=DOCUMENTS)


def _mask_of_image(source: Source, inputs: Inputs) -> Tensor:
    """Makes the mask of pictures that each word sees."""
    count = inputs["pixel_values"].shape[1]
    return torch.ones(BATCH, int(inputs["input_ids"].shape[-1]), count, dtype=torch.long)


def _places_of_image(source: Source, inputs: Inputs) -> Tensor:
    """Marks the words that are replaced by what a picture becomes."""
    count = source.number("latent_query_num", default=SEQUENCE)
    mask = torch.zeros(BATCH, int(inputs["input_ids"].shape[-1]), dtype=torch.long)
    mask[:, :count] = 1
    return mask


def _like(name: str) -> Named:
    return lambda source, inputs: source.real(*inputs[name].shape)


def _features_mask(source: Source, inputs: Inputs) -> Tensor:
    features = inputs["input_features"]
    return torch.ones(BATCH, features.shape[1], dtype=torch.long)


def _step_labels(source: Source, inputs: Inputs) -> Tensor:
    """A number for each word."""
    return source.real(BATCH, SEQUENCE, 1)


# Values of arguments; a maker that does not fit the main inputs may raise.
NAMED: dict[str, Named] = {
    "qformer_input_ids": _words,
    "qformer_attention_mask": _ones,
    "classes_input_ids": lambda s, i: s.words(2 * BATCH, SEQUENCE),
    "classes_attention_mask": lambda s, i: torch.ones(2 * BATCH, SEQUENCE, dtype=torch.long),
    "classes_structure": lambda s, i: torch.full((BATCH,), 2),
    "tasks_input_ids": _words,
    "tasks_attention_mask": _ones,
    "task_inputs": lambda s, i: s.words(BATCH, s.number("task_seq_len", default=SEQUENCE)),
    "context_input_ids": lambda s, i: s.words(BATCH * _documents(s), SEQUENCE),
    "context_attention_mask": lambda s, i: torch.ones(
        BATCH * _documents(s), SEQUENCE, dtype=torch.long
    ),
    "doc_scores": lambda s, i: s.real(BATCH, _documents(s)),
    "prompt_pixel_values": _like("pixel_values"),
    "prompt_masks": _like("pixel_values"),
    "visual_feats": lambda s, i: s.real(BATCH, REGIONS, s.number("visual_feat_dim", default=32)),
    "visual_pos": lambda s, i: s.real(BATCH, REGIONS, s.number("visual_pos_dim", default=4)),
    "image_attention_mask": _mask_of_image,
    "image_embeds_position_mask": _places_of_image,
    "mm_token_type_ids": lambda s, i: torch.zeros_like(i["input_ids"]),
    "is_longer": lambda s, i: torch.zeros(BATCH, 1, dtype=torch.bool),
    "generation_steps": lambda s, i: 1,
    "input_features_mask": _features_mask,
    "feature_attention_mask": _features_mask,
    "duration_labels": lambda s, i: torch.ones(BATCH, SEQUENCE, dtype=torch.long),
    "pitch_labels": _step_labels,
    "energy_labels": _step_labels,
    "spectrogram_labels": lambda s, i: s.real(
        BATCH, SEQUENCE, s.number("num_mel_bins", default=32)
    ),
    "decoder_input_values": lambda s, i: s.real(
        BATCH, SEQUENCE, s.number("num_mel_bins", default=32)
    ),
    "question_positions": lambda s, i: torch.ones(BATCH, 1, dtype=torch.long),
}


def with_named(source: Source, inputs: Inputs, optional: bool) -> Inputs:
    """Main inputs, with further arguments that a rule knows; required ones in any case."""
    added = dict(inputs)
    for name, parameter in source.parameters.items():
        if name in inputs or name not in NAMED:
            continue
        if optional or parameter.default is inspect.Parameter.empty:
            added[name] = NAMED[name](source, inputs)
    return added
