"""Losses over sequences: language models of transformers and by hand, recurrent nets, speech."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from tests.losses.case import (
    EQUAL,
    EQUAL_WARNED,
    LENGTH,
    SAMPLES,
    WARNED,
    Batch,
    case,
    padding,
    randint,
    randn,
)

WORDS = 11


def tokens() -> Batch:
    """A padded batch with a prompt that is not trained."""
    ids, mask = randint(WORDS, SAMPLES, LENGTH), padding(LENGTH)
    labels = ids.masked_fill(~mask, -100)
    labels[2, :2] = labels[6, 0] = -100
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def without_shift() -> Batch:
    batch = tokens()
    batch["labels"] = batch["labels"].masked_fill(randn(SAMPLES, LENGTH, seed=18) > 0.2, -100)
    return batch


COUNTED, SHIFTED = "(labels != -100).sum()", "(labels[:, 1:] != -100).sum()"

SMALL = dict(
    vocab_size=WORDS, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=12, max_position_embeddings=16,
)  # fmt: skip
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
GPT = dict(
    vocab_size=WORDS, n_embd=8, n_layer=2, n_head=2, n_positions=16, n_inner=12,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
T5 = dict(
    vocab_size=WORDS, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, dropout_rate=0.0,
    decoder_start_token_id=0, pad_token_id=0,
)  # fmt: skip
BART = dict(
    vocab_size=WORDS, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=12, decoder_ffn_dim=12, max_position_embeddings=16,
    dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, pad_token_id=1, bos_token_id=0,
    eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
)  # fmt: skip


def of(kind: str, config: str, **fields: Any) -> Callable[[], nn.Module]:
    """Makes a model of transformers."""

    def make() -> nn.Module:
        made = getattr(transformers, config)(**fields)
        made.use_cache = False
        made._experts_implementation = "eager"  # the grouped one has no float64
        model: nn.Module = getattr(transformers, kind)(made)
        return model

    return make


def own_loss(model: Any, **batch: Any) -> Tensor:
    """The loss of the model itself."""
    loss: Tensor = model(**batch)["loss"]
    return loss


def numbered(batch: Callable[[], Batch]) -> Callable[[], Batch]:
    """Adds the number of all labels, as the Trainer passes it to models that may not use it."""

    def make() -> Batch:
        made = batch()
        return made | {"num_items_in_batch": (made["labels"] != -100).sum()}

    return make


def hf(name: str, kind: str, config: str, batch: Callable[[], Batch], **options: Any) -> None:
    """Registers a model of transformers; ``weight=None`` says that none is needed."""
    known = ("default", "weight", "weighted", "tolerance", "whole")
    fields = {k: options.pop(k) for k in known if k in options}
    case(name, model=of(kind, config, **options), batch=batch, **fields)(own_loss)


hf(
    "GPT-2, padded", "GPT2LMHeadModel", "GPT2Config", tokens, weight=SHIFTED, tolerance=1e-6, **GPT,
)  # fmt: skip
hf(
    "GPT-J, padded", "GPTJForCausalLM", "GPTJConfig", tokens, weight=SHIFTED,
    tolerance=1e-6, rotary_dim=2, **GPT,
)  # fmt: skip
hf(
    "Llama, padded", "LlamaForCausalLM", "LlamaConfig", tokens, weight=SHIFTED,
    tolerance=1e-5, num_key_value_heads=1, **SMALL,
)  # fmt: skip
hf(
    "GPT-NeoX, padded", "GPTNeoXForCausalLM", "GPTNeoXConfig", tokens, weight=SHIFTED,
    tolerance=1e-5, **SMALL,
)  # fmt: skip
hf(
    "Mixtral, padded, with the balance of experts", "MixtralForCausalLM", "MixtralConfig", tokens,
    default=WARNED, tolerance=1e-5, num_key_value_heads=1, num_local_experts=4,
    output_router_logits=True, router_aux_loss_coef=0.5, **SMALL,
)  # fmt: skip
hf(
    "BERT, masked words", "BertForMaskedLM", "BertConfig", without_shift, weight=COUNTED,
    **SMALL, **NO_DROPOUT,
)  # fmt: skip
hf(
    "RoBERTa, masked words", "RobertaForMaskedLM", "RobertaConfig", without_shift, weight=COUNTED,
    pad_token_id=1, type_vocab_size=1, **SMALL, **NO_DROPOUT,
)  # fmt: skip
hf(
    "BERT, token classification", "BertForTokenClassification", "BertConfig",
    lambda: tokens() | {"labels": tokens()["labels"].clamp(max=2)}, weight=COUNTED, num_labels=3,
    **SMALL, **NO_DROPOUT,
)  # fmt: skip
hf(
    "BERT, masked words, told their number", "BertForMaskedLM", "BertConfig",
    numbered(without_shift), weight=COUNTED, whole=("num_items_in_batch",), **SMALL, **NO_DROPOUT,
)  # fmt: skip
hf(
    "GPT-2, padded, divided by a number", "GPT2LMHeadModel", "GPT2Config", numbered(tokens),
    tolerance=1e-6, whole=("num_items_in_batch",), **GPT,
)  # fmt: skip
SPLIT_IN_PART = {"tp 2": EQUAL_WARNED, "": EQUAL}  # attention stays whole, by name
hf(
    "T5, padded", "T5ForConditionalGeneration", "T5Config", tokens, weight=COUNTED,
    default=SPLIT_IN_PART, weighted=SPLIT_IN_PART, **T5,
)  # fmt: skip
hf("BART, padded", "BartForConditionalGeneration", "BartConfig", tokens, weight=COUNTED, **BART)


def answers() -> Batch:
    """Makes a batch with samples without an answer: positions beyond the sequence, ignored."""
    batch = tokens()
    del batch["labels"]
    start = torch.tensor([0, 9, 2, 1, 9, 9, 9, 0])
    return batch | {"start_positions": start, "end_positions": (start + 1).clamp(max=9)}


hf(
    "BERT, question answering", "BertForQuestionAnswering", "BertConfig", answers,
    default=WARNED,
    weight="(start_positions < LENGTH).sum()",
    **SMALL, **NO_DROPOUT,
)  # fmt: skip


def labelled(labels: Callable[[], Tensor]) -> Callable[[], Batch]:
    return lambda: tokens() | {"labels": labels()}


hf(
    "BERT, sequence classification", "BertForSequenceClassification", "BertConfig",
    labelled(lambda: randint(3, SAMPLES)), num_labels=3, **SMALL, **NO_DROPOUT,
)  # fmt: skip
hf(
    "BERT, several labels", "BertForSequenceClassification", "BertConfig",
    labelled(lambda: randint(2, SAMPLES, 3).double()), num_labels=3,
    problem_type="multi_label_classification", **SMALL, **NO_DROPOUT,
)  # fmt: skip
hf(
    "BERT, regression", "BertForSequenceClassification", "BertConfig",
    labelled(lambda: randn(SAMPLES)), num_labels=1, **SMALL, **NO_DROPOUT,
)  # fmt: skip
hf(
    "GPT-2, sequence classification", "GPT2ForSequenceClassification", "GPT2Config",
    labelled(lambda: randint(3, SAMPLES)), num_labels=3, pad_token_id=0, **GPT,
)  # fmt: skip
hf(
    "BERT, multiple choice", "BertForMultipleChoice", "BertConfig",
    lambda: {"input_ids": randint(WORDS, SAMPLES, 3, LENGTH), "labels": randint(3, SAMPLES)},
    **SMALL, **NO_DROPOUT,
)  # fmt: skip
hf(
    "ViT", "ViTForImageClassification", "ViTConfig",
    lambda: {"pixel_values": randn(SAMPLES, 3, 8, 8), "labels": randint(3, SAMPLES)},
    hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, image_size=8,
    patch_size=4, num_labels=3, **NO_DROPOUT,
)  # fmt: skip


@case(
    "CLIP of transformers",
    model=lambda: transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config=dict(SMALL, eos_token_id=10, projection_dim=6),
            vision_config=dict(
                hidden_size=8,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=12,
                image_size=8,
                patch_size=4,
                projection_dim=6,
            ),
            projection_dim=6,
        )  # fmt: skip
    ),
    batch=lambda: {"input_ids": randint(WORDS, 8, 6), "pixel_values": randn(8, 3, 8, 8)},
    default=WARNED,
    tolerance=1e-5,
)
def clip_model(model: Any, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
    return own_loss(model, input_ids=input_ids, pixel_values=pixel_values, return_loss=True)


# ---- language models by hand


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.one, self.two = (
            nn.Embedding(WORDS, 8),
            nn.Linear(8, 9),
            nn.Linear(9, WORDS),
        )

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.two(torch.tanh(self.one(self.embed(ids))))
        return out


def shifted(model: Any, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return model(input_ids)[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1)


def hand(name: str, **fields: Any) -> Callable[[Any], Any]:
    own = {"model": Tiny, "batch": tokens, "default": WARNED, "weight": SHIFTED, **fields}
    return case(name, **own)


@hand("language model, shifted in the step")
def shift(model: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*shifted(model, input_ids, labels))


@hand("language model with label smoothing")
def shift_smoothing(
    model: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
) -> Tensor:
    return F.cross_entropy(*shifted(model, input_ids, labels), label_smoothing=0.1)


@hand("language model with a z-loss over tokens")
def shift_z(model: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
    logits, wanted = shifted(model, input_ids, labels)
    z = logits.logsumexp(-1).square()[wanted != -100].mean()
    return F.cross_entropy(logits, wanted) + 0.1 * z


@hand("language model, a z-loss over all positions", weight=None)
def shift_z_all(model: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
    logits, wanted = shifted(model, input_ids, labels)
    return F.cross_entropy(logits, wanted) + 0.5 * logits.logsumexp(-1).square().mean()


@hand("language model, mean over each sequence", default="equal", weight=None)
def per_sequence(model: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
    logits, wanted = shifted(model, input_ids, labels)
    losses = F.cross_entropy(logits, wanted, reduction="none").view(len(labels), -1)
    return (losses.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)).mean()


@hand("language model, summed over tokens", weight=None)
def summed(model: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*shifted(model, input_ids, labels), reduction="sum")


@hand("language model, tokens by their sum, divided by samples", default="equal", weight=None)
def by_samples(model: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*shifted(model, input_ids, labels), reduction="sum") / len(labels)


@hand(
    "distillation of tokens with a mask",
    weight="attention_mask.sum()",
)
def distill(model: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
    teacher = randn(SAMPLES, WORDS, seed=19)[input_ids % SAMPLES].softmax(-1)
    losses = F.kl_div(model(input_ids).log_softmax(-1), teacher, reduction="none").sum(-1)
    return (losses * attention_mask).sum() / attention_mask.sum()


# ---- recurrent nets and masks


class Recurrent(nn.Module):
    """The default of PyTorch: time first."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 6, batch_first=batch_first)
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Any, state: Tensor | None = None) -> Tensor:
        _, last = self.rnn(x) if state is None else self.rnn(x, state)
        out: Tensor = self.head(last[-1])
        return out


def time_major(length: int = 5) -> Batch:
    return {"x": randn(length, SAMPLES, 4), "y": randint(3, SAMPLES)}


@case("time first", model=Recurrent, batch=time_major, axes={"x": 1})
def time_first(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@case("time first, with a state", model=Recurrent, axes={"x": 1, "state": 1},
      batch=lambda: time_major() | {"state": randn(1, SAMPLES, 6)})  # fmt: skip
def time_first_state(model: Any, x: Tensor, y: Tensor, state: Tensor) -> Tensor:
    return F.cross_entropy(model(x, state), y)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 6)
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(x)[0])
        return out


def tagged() -> Batch:
    return {"x": randn(16, SAMPLES, 4), "y": randint(3, 16, SAMPLES)}


@case("time first, a class at each time", model=Tagger, batch=tagged, axes={"x": 1, "y": 1})
def tags(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


class Packed(PackedSequence):
    """A packed sequence that the harness can divide among replicas."""

    def part(self, begin: int, end: int) -> PackedSequence:
        return packed(begin, end)


def packed(begin: int, end: int) -> PackedSequence:
    lengths = padding(5).sum(1)[begin:end]
    x = randn(SAMPLES, 5, 4)[begin:end]
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


@case(
    "packed sequences",
    model=lambda: Recurrent(batch_first=True),
    batch=lambda: {"x": Packed(*packed(0, SAMPLES)), "y": randint(3, SAMPLES)},
)
def pack(model: Any, x: PackedSequence, y: Tensor) -> Tensor:
    return F.cross_entropy(model(PackedSequence(*x)), y)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=mask)
        head: Tensor = self.head(out.mean(1))
        return head


def masked(*shape: int) -> Callable[[], Batch]:
    return lambda: {
        "x": randn(SAMPLES, 5, 4),
        "y": randint(3, SAMPLES),
        "mask": torch.ones(5, 5, dtype=torch.bool).tril().view(shape),
    }


@case("a mask of one row", model=Attention, batch=masked(1, 5, 5))
def mask_row(model: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(model(x, mask), y)


@case("a mask of time by time", model=Attention, batch=masked(5, 5), whole=("mask",))
def mask_square(model: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(model(x, mask), y)


# ---- speech


def speech() -> Batch:
    return {
        "x": randn(SAMPLES, 9, 4),
        "y": randint(2, SAMPLES, 5) + 1,
        "lengths": torch.tensor([4, 1, 2, 3, 1, 1, 4, 2]),
    }


class Acoustic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x).log_softmax(-1).transpose(0, 1)
        return out


def frames(x: Tensor) -> Tensor:
    return torch.full((len(x),), x.shape[1])


@case("CTC", model=Acoustic, batch=speech)
def ctc(model: Any, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
    return F.ctc_loss(model(x), y, frames(x), lengths)


@case(
    "CTC, by the length of all targets",
    model=Acoustic,
    batch=speech,
    default=WARNED,
    weight="lengths.sum()",
)
def ctc_total(model: Any, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
    losses = F.ctc_loss(model(x), y, frames(x), lengths, reduction="sum")
    return losses / lengths.sum()
