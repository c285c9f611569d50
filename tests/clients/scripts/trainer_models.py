"""Models and data of client G, for every release of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForSequenceClassification,
)

VOCABULARY, LENGTH, LAYERS, CLASSES, MASKED = 60, 12, 4, 3, 4
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def model_of(kind: str) -> nn.Module:
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=LAYERS, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2,
        )  # fmt: skip
        return GPT2LMHeadModel(config)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 20,
        "initializer_range": 0.2,
    }  # fmt: skip
    if kind == "roberta":
        config = RobertaConfig(**sizes, **NO_DROPOUT, num_labels=CLASSES, classifier_dropout=0.0)
        return RobertaForSequenceClassification(config)
    return BertForMaskedLM(BertConfig(**sizes, **NO_DROPOUT))


def samples_of(kind: str, count: int, seed: int) -> list[dict[str, Tensor]]:
    """Every sample has equally many counted labels, so means of microbatches are means."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        ids = torch.randint(4, VOCABULARY, (LENGTH,), generator=generator)
        ids[1::2] = ids[::2]  # something to be learnt
        labels = ids.clone()
        if kind == "roberta":
            labels = ids[0] % CLASSES
        elif kind == "bert":
            masked = torch.randperm(LENGTH, generator=generator)[:MASKED]
            labels = torch.full_like(ids, -100)
            labels[masked] = ids[masked]
            ids[masked] = 3
        samples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return samples


def accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction.predictions, prediction.label_ids
    counted = labels != -100
    right = logits.argmax(-1) == labels
    return {"accuracy": float(right[counted].mean()), "checksum": float(np.abs(logits).sum())}
