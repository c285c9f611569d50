"""Model families that users train: Hugging Face classes as they come, and other architectures.

A case is a family name with options: ``"hf/gpt2"``, ``"hf/gpt2+nocache"``, ``"hf/t5+dropout"``.
Sizes are tiny; everything else keeps the defaults of the installed transformers, except

* dropout: off, so that runs can be compared with one process; ``+dropout`` leaves the defaults;
* ``use_cache``: the default (on in most families); ``+nocache`` switches it off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference.hybrid_families import HYBRID

VOCABULARY = 41
BATCH = 8
SEQUENCE = 7
CLASSES = 3
IMAGE = 8

Batch = dict[str, Tensor]
Maker = Callable[[frozenset[str]], nn.Module]

# Names of the arguments that switch dropout, over all configuration classes.
_DROPOUTS = (
    "resid_pdrop", "embd_pdrop", "attn_pdrop", "resid_dropout", "embed_dropout",
    "attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob",
    "dropout_rate", "classifier_dropout",
)  # fmt: skip


def hugging_face(model: str, config: str, **sizes: Any) -> Maker:
    """Builds a transformers class; sizes are arguments of its configuration."""

    def make(options: frozenset[str]) -> nn.Module:
        import transformers

        arguments = dict(sizes)
        config_class = getattr(transformers, config)
        if "dropout" not in options:
            defaults = vars(config_class())
            arguments |= {n: 0.0 for n in _DROPOUTS if isinstance(defaults.get(n), float)}
        if "nocache" in options:
            arguments["use_cache"] = False
        built: nn.Module = getattr(transformers, model)(config_class(**arguments))
        return built

    return make


_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
_LLAMA = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, **_TOKENS,
}  # fmt: skip
_BERT = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
    "max_position_embeddings": 16, "num_labels": CLASSES, **_TOKENS,
}  # fmt: skip

CAUSAL: dict[str, Maker] = {
    "hf/gpt2": hugging_face(
        "GPT2LMHeadModel", "GPT2Config", n_positions=16, n_embd=16, n_layer=4, n_head=2, **_TOKENS
    ),
    "hf/gptj": hugging_face(
        "GPTJForCausalLM", "GPTJConfig",
        n_positions=16, n_embd=16, n_layer=4, n_head=2, rotary_dim=4, **_TOKENS,
    ),
    "hf/gpt_neo": hugging_face(
        "GPTNeoForCausalLM", "GPTNeoConfig",
        max_position_embeddings=16, hidden_size=16, num_layers=4, num_heads=2, window_size=3,
        attention_types=[[["global", "local"], 2]], **_TOKENS,
    ),
    "hf/gpt_neox": hugging_face(
        "GPTNeoXForCausalLM", "GPTNeoXConfig",
        max_position_embeddings=16, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2, **_TOKENS,
    ),
    "hf/llama": hugging_face("LlamaForCausalLM", "LlamaConfig", **_LLAMA),
    "hf/qwen2": hugging_face("Qwen2ForCausalLM", "Qwen2Config", **_LLAMA),
    "hf/mistral": hugging_face("MistralForCausalLM", "MistralConfig", **_LLAMA),
}  # fmt: skip
CLASSIFIERS: dict[str, Maker] = {
    "hf/bert": hugging_face("BertForSequenceClassification", "BertConfig", **_BERT),
    "hf/roberta": hugging_face(
        "RobertaForSequenceClassification", "RobertaConfig", **_BERT | {"pad_token_id": 1}
    ),
}
_T5 = hugging_face(
    "T5ForConditionalGeneration", "T5Config",
    vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2,
    num_heads=2, relative_attention_num_buckets=8, relative_attention_max_distance=16,
    decoder_start_token_id=0, pad_token_id=0,
)  # fmt: skip
_VIT = hugging_face(
    "ViTForImageClassification", "ViTConfig",
    hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
    image_size=IMAGE, patch_size=4, num_labels=CLASSES,
)  # fmt: skip


# ---- other architectures ---------------------------------------------------


class Translator(nn.Module):
    """``nn.Transformer`` as it comes, with embeddings and a head."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, 12)
        self.target = nn.Embedding(VOCABULARY, 12)
        self.transformer = nn.Transformer(
            12, 2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=16,
            dropout=dropout, batch_first=True,
        )  # fmt: skip
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        padding = attention_mask == 0
        length = labels.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        shifted = labels.clamp(min=0).roll(1, 1)
        hidden = self.transformer(
            self.source(input_ids),
            self.target(shifted),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Residual(nn.Module):
    """Two convolutions with batch norm around a shortcut; the additions are in place."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResidualCnn(nn.Module):
    """A small ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        )
        self.stages = nn.Sequential(
            Residual(4, 4, 1), Residual(4, 6, 2), Residual(6, 6, 1), Residual(6, 8, 2)
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        features = self.pool(self.stages(self.stem(pixel_values))).flatten(1)
        return nn.functional.cross_entropy(self.head(features), labels)


class Expert(nn.Module):
    """Works on the tokens that were sent to it, perhaps none."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(2 * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(self.drop(nn.functional.gelu(self.up(tokens))))


class MixtureLayer(nn.Module):
    """A layer in which each token chooses two of five experts.

    An expert without tokens is called with none (even experts) or not at all (odd ones).
    """

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, 5, bias=False)
        self.experts = nn.ModuleList(Expert(width, dropout) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        result = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, slots = (chosen == index).nonzero(as_tuple=True)
            if len(rows) == 0 and index % 2:
                continue
            result.index_add_(0, rows, expert(tokens[rows]) * weights[rows, slots, None])
        return x + result.view_as(x)


class Mixture(nn.Module):
    """A mixture-of-experts language model without attention."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(MixtureLayer(8, dropout) for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(input_ids) * attention_mask[..., None]
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Compose(nn.Module):
    """Joins two subtrees."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width, bias=False)
        self.gate = nn.Bilinear(width, width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        joined = torch.tanh(self.left(left) + self.right(right))
        return self.drop(joined) + torch.sigmoid(self.gate(left, right)) * left


class TreeNetwork(nn.Module):
    """Calls itself along the tree of each sample (Socher et al. 2011, "recursive networks").

    A sample's tree comes from its tokens: a subsequence is cut where its tokens tell.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.leaf = nn.Embedding(VOCABULARY, 6)
        self.compose = Compose(6, dropout)
        self.compose_large = Compose(6, dropout)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        roots = [
            self.encode(self.leaf(ids[: int(mask.sum())]), ids.tolist(), 0, int(mask.sum()))
            for ids, mask in zip(input_ids, attention_mask, strict=True)
        ]
        return nn.functional.cross_entropy(self.head(torch.stack(roots)), labels)

    def encode(self, leaves: Tensor, ids: list[int], begin: int, end: int) -> Tensor:
        if end - begin == 1:
            return leaves[begin]
        cut = begin + 1 + sum(ids[begin:end]) % (end - begin - 1)
        compose = self.compose_large if end - begin > 3 else self.compose
        return compose(self.encode(leaves, ids, begin, cut), self.encode(leaves, ids, cut, end))


def _dropout(options: frozenset[str]) -> float:
    return 0.1 if "dropout" in options else 0.0


FAMILIES: dict[str, Maker] = {
    **CAUSAL,
    **CLASSIFIERS,
    "hf/t5": _T5,
    "hf/vit": _VIT,
    "hf/mistral of a window": hugging_face(
        "MistralForCausalLM", "MistralConfig", sliding_window=3, **_LLAMA
    ),
    "nn/transformer": lambda options: Translator(_dropout(options)),
    "cnn": lambda options: ResidualCnn(),
    "moe": lambda options: Mixture(_dropout(options)),
    "tree": lambda options: TreeNetwork(_dropout(options)),
}
_IMAGES = ("hf/vit", "cnn")
_LABEL_PER_SAMPLE = (*CLASSIFIERS, *_IMAGES, "tree")


def family_of(case: str) -> str | None:
    """The family of a case, None if it is none of this file."""
    name = case.split("+")[0]
    return name if name in FAMILIES or name in HYBRID else None


def build_family(case: str) -> nn.Module:
    name, *options = case.split("+")
    unknown = set(options) - {"dropout", "nocache"}
    if unknown:
        raise ValueError(f"case '{case}': unknown options {sorted(unknown)}")
    return (FAMILIES | HYBRID)[name](frozenset(options))


def make_family_batch(case: str, dtype: torch.dtype, generator: torch.Generator) -> Batch:
    """Eight samples; tokens are padded at the right, labels of padding are -100."""
    name = family_of(case)
    labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    if name in _IMAGES:
        shape = (BATCH, 3, IMAGE, IMAGE)
        pixels = torch.randn(shape, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels.to(dtype), "labels": labels}
    ids = torch.randint(2, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    lengths = torch.randint(3, SEQUENCE + 1, (BATCH, 1), generator=generator)
    mask = (torch.arange(SEQUENCE) < lengths).long()
    padding = 1 if name == "hf/roberta" else 0
    ids = ids * mask + padding * (1 - mask)
    if name not in _LABEL_PER_SAMPLE:
        labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def family_loss(case: str, model: nn.Module, batch: Batch) -> Tensor:
    output = model(**batch)
    loss: Tensor = output if isinstance(output, Tensor) else output["loss"]
    return loss
