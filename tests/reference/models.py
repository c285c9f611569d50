"""Small models with every construct that a pipeline has to survive.

Each case is built by ``build(case, dtype, place)``. `place` maps an index to a
context manager: ``smp.partition`` in a distributed run with manual partition
(indices wrap around at the pipeline size), a null context otherwise.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference.families import build_family, family_of

Place = Callable[[int], contextlib.AbstractContextManager[Any]]
WIDTH = 6
VOCABULARY = 41


def nowhere(index: int) -> contextlib.AbstractContextManager[Any]:
    """The `place` of a plain, one-process model."""
    return contextlib.nullcontext()


def randomise_(model: nn.Module, seed: int) -> nn.Module:
    """Gives every parameter a value that no default shares.

    Values depend on the name and the seed only, not on the order of creation.
    Norm weights are near one, biases are not zero.
    """
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.dim() >= 2:
            value = noise * (0.7 / parameter.shape[-1] ** 0.5)
        elif name.endswith("weight"):
            value = 1.0 + 0.2 * noise
        else:
            value = 0.2 * noise
        with torch.no_grad():
            parameter.copy_(value)
    return model


# ---- own modules -----------------------------------------------------------


class Affine(nn.Module):
    """A linear map, a norm, a nonlinearity: something with bias and gain."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


class Chain(nn.Module):
    """A Sequential, one partition after the other."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        layers = []
        for i in range(4):
            with place(i):
                layers.append(Affine())
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class Reuse(nn.Module):
    """A model with a module that is called three times and a parameter used in two modules."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        with place(1):
            self.shared = Affine()
        with place(2):
            self.between = Affine()
        with place(3):
            self.other = nn.Linear(WIDTH, WIDTH)
            self.tied = nn.Linear(WIDTH, WIDTH)
            self.tied.weight = self.other.weight
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        x = self.between(x) + x
        x = self.shared(x * 0.5)
        x = self.other(x) - self.tied(x * x)
        return self.head(self.shared(x))


class Russian(nn.Module):
    """A doll: it calls the doll inside it, between two computations of its own."""

    def __init__(self, place: Place, index: int, depth: int) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.after = nn.Linear(WIDTH, WIDTH)
        self.inner: nn.Module | None = None
        if depth:
            with place(index + 1):
                self.inner = Russian(place, index + 1, depth - 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(self.before(x))
        if self.inner is not None:
            y = self.inner(y) + 0.3 * y
        return self.after(y) * x


class Nested(nn.Module):
    """Remote modules inside remote modules: partition 0 -> 1 -> 0 -> 1 (-> ...)."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        with place(0):
            self.doll = Russian(place, 0, 4)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.doll(x))


class Zigzag(nn.Module):
    """Every rank is visited again and again."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for i in (0, 3, 1, 2, 1, 0, 1, 3):
            with place(i):
                self.layers.append(Affine())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = x
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i % 3 == 2:
                x = x + skip
                skip = x
        return self.head(x)


@dataclass
class Parcel:
    """An argument type that the library has never heard of."""

    values: Tensor
    scale: float
    extras: dict[str, Tensor | None] = field(default_factory=dict)


class Unpack(nn.Module):
    """Takes a dataclass, keywords, None and bools; returns the like."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, parcel: Parcel, *, gate: Tensor, negate: bool, bias: Tensor | None = None
    ) -> tuple[Parcel, None, bool]:
        y = self.linear(parcel.values) * parcel.scale * gate
        first = parcel.extras["first"]
        y = y + first if first is not None else y
        if bias is not None:
            y = y + bias
        if negate:
            y = -y
        out = Parcel(y, parcel.scale / 2, {"first": torch.cos(y), "nothing": None})
        return out, None, not negate


class Dicts(nn.Module):
    """Takes a dict of lists and returns a transformers ModelOutput."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: dict[str, Any]) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        a, (b, none) = inputs["pair"]
        assert none is None
        hidden = torch.tanh(self.linear(a) + b * inputs["factor"])
        return BaseModelOutput(last_hidden_state=hidden, hidden_states=(hidden * 2, a))


class Structures(nn.Module):
    """Arguments and results of many types; tensors used by several modules.

    The root's own parameters travel as arguments as well.
    """

    def __init__(self, place: Place) -> None:
        super().__init__()
        with place(1):
            self.first = Unpack()
        with place(2):
            self.second = Dicts()
        with place(3):
            self.third = Unpack()
        self.gate = nn.Parameter(torch.empty(WIDTH))
        self.bias = nn.Parameter(torch.empty(WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate)
        parcel = Parcel(x, 1.5, {"first": None})
        parcel, nothing, flag = self.first(parcel, gate=gate, negate=False, bias=self.bias)
        assert nothing is None and flag is True and parcel.extras["nothing"] is None
        output = self.second({"pair": [parcel.values, (gate, None)], "factor": 3})
        hidden, (doubled, passed) = output["last_hidden_state"], output.hidden_states
        assert output.attentions is None
        parcel.values = hidden + passed
        parcel, nothing, flag = self.third(parcel, gate=gate * 2, negate=flag)
        assert nothing is None and flag is False
        return self.head(parcel.values + doubled * gate)


class Branches(nn.Module):
    """Control flow that depends on data: which modules run, and how often."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        with place(1):
            self.positive = Affine()
            self.loop = Affine()
        with place(2):
            self.negative = Affine()
        with place(3):
            self.never = Affine()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.positive(x) if x.sum() > 0 else self.negative(x * 2)
        for _ in range(1 + int(x.detach().abs().sum() * 10) % 3):
            x = self.loop(x)
        if x.abs().max() > 1e6:
            x = self.never(x)
        return self.head(x)


class Several(nn.Module):
    """A module that returns more than is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.wasted = nn.Linear(WIDTH, WIDTH)
        self.untouched = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, ignored: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        index = torch.arange(x.shape[0])
        return self.used(x), self.wasted(x), index, None


class Unused(nn.Module):
    """Outputs without a use, parameters without a use, an argument without effect."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        with place(1):
            self.several = Several()
        with place(2):
            self.frozen = Affine()
            self.frozen.requires_grad_(False)
        self.lonely = nn.Parameter(torch.empty(3))
        with place(3):
            self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        used, _, index, _ = self.several(torch.sin(x), x * 2)
        assert not index.requires_grad and index.dtype == torch.int64
        return self.head(self.frozen(used)) + index.to(x.dtype).mean()


class Passing(nn.Module):
    """Modules that hand back what they got, modules without parameters, twins.

    `twice(x, x)` receives one tensor in two places; `identity` returns its
    argument; dropout of probability zero does the same.
    """

    def __init__(self, place: Place) -> None:
        super().__init__()
        with place(1):
            self.twice = nn.Bilinear(WIDTH, WIDTH, WIDTH)
            self.identity = nn.Sequential(nn.Identity(), nn.Dropout(0.0))
        with place(2):
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        with place(3):
            self.relu = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.identity(self.twice(x, x))) + x
        y = x.view(-1, 1, WIDTH).expand(-1, 3, -1) * torch.arange(1, 4)[:, None]
        mask = torch.tensor([False, False, True]).expand(x.shape[0], -1)
        z, weights = self.attention(y, y, y, key_padding_mask=mask)
        return self.head(self.relu(z.mean(1)) + weights[:, 0, :1] * x)


class Dropping(nn.Module):
    """Dropout everywhere, for tests of random numbers."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(4):
            with place(i):
                layers.append(nn.Sequential(Affine(), nn.Dropout(0.4)))
        self.layers = nn.Sequential(*layers)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.layers(x)))


OWN_MODELS: dict[str, Callable[[Place], nn.Module]] = {
    "chain": Chain,
    "reuse": Reuse,
    "nested": Nested,
    "zigzag": Zigzag,
    "structures": Structures,
    "branches": Branches,
    "unused": Unused,
    "passing": Passing,
    "dropping": Dropping,
}

# ---- Hugging Face ----------------------------------------------------------


def _gptj() -> nn.Module:
    from transformers import GPTJConfig, GPTJForCausalLM

    return GPTJForCausalLM(
        GPTJConfig(
            vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=4, n_head=2, rotary_dim=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=4, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY, max_position_embeddings=16, hidden_size=16,
            num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, num_labels=3,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, use_cache=False,
        )
    )  # fmt: skip


HF_MODELS: dict[str, Callable[[], nn.Module]] = {"gptj": _gptj, "gpt2": _gpt2, "bert": _bert}
# Containers whose children a manual partition spreads over the ranks.
HF_LAYERS = {"gptj": "transformer.h", "gpt2": "transformer.h", "bert": "bert.encoder.layer"}


def build(case: str, dtype: torch.dtype, place: Place = nowhere, seed: int = 1) -> nn.Module:
    """The model of a case, randomised, in training mode."""
    if family_of(case) is not None:
        model = build_family(case)
    else:
        model = HF_MODELS[case]() if case in HF_MODELS else OWN_MODELS[case](place)
    return randomise_(model.to(dtype), seed).train()
