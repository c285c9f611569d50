"""Models that drop in every way that PyTorch has, and their batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES, LENGTH, WIDTH, VOCABULARY = 8, 5, 12, 17


class Block(nn.Module):
    """Dropout of modules and functions, of attention in its three forms, and of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.eager = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner = nn.Dropout(0.3)
        self.channels = nn.Dropout1d(0.2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(2, (2, -1)).transpose(1, 2).chunk(3, -1)
        p = 0.2 if self.training else 0.0
        heads = F.scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=True)
        x = x + F.dropout(heads.transpose(1, 2).flatten(2), 0.1, self.training)
        x = x + self.eager(x, x, x)[0]
        x = x + self.eager(x, x, x, need_weights=False)[0]  # the same module, another call
        return x + self.channels(self.down(self.inner(torch.tanh(self.up(x)))))


class Dropping(nn.Module):
    """A model of blocks, a layer with samples behind positions, an LSTM, and a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.Dropout(0.3)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.turned = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.2)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2, batch_first=True)
        self.twice = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.AlphaDropout(0.1))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.first(self.embedding(ids)))
        x = self.turned(x.transpose(0, 1)).transpose(0, 1)
        x = self.twice(self.twice(x + self.recurrent(x)[0]))
        return self.head(F.dropout(x, 0.1, self.training)).pow(2).mean()


def make(seed: int = 1) -> Dropping:
    torch.manual_seed(seed)
    return Dropping().double()


def batch(step: int) -> Tensor:
    """Token ids ``[SAMPLES, LENGTH]`` of all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)


class Split(nn.Module):
    """Plain dropout around layers of `smp.nn`, which have their own."""

    def __init__(self) -> None:
        super().__init__()
        import smp

        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.before = nn.Dropout(0.3)
        self.layers = smp.nn.DistributedTransformer(
            num_layers=3,
            num_attention_heads=4,
            attention_head_size=4,
            hidden_size=WIDTH,
            intermediate_size=10,
            attention_dropout_prob=0.2,
            hidden_dropout_prob=0.2,
        )
        self.behind = nn.Dropout(0.3)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.layers((self.before(self.embedding(ids)), None))
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.head(self.behind(hidden)).pow(2).mean()


class SplitLM(nn.Module):
    """A language model of `smp.nn`: its embedding drops inside of the layout."""

    def __init__(self) -> None:
        super().__init__()
        import smp

        self.model = smp.nn.DistributedTransformerLMHead(
            num_layers=2,
            num_attention_heads=4,
            attention_head_size=4,
            hidden_size=WIDTH,
            intermediate_size=10,
            vocab_size=VOCABULARY,
            num_positions=LENGTH,
            attention_dropout_prob=0.2,
            hidden_dropout_prob=0.2,
            embedding_dropout_prob=0.3,
            causal_mask_size=LENGTH,
            window_size=3,
        )

    def forward(self, ids: Tensor) -> Any:
        return self.model((ids, None, None, None, ids)).loss


HEADS, INNER = 3, 15  # no number of ranks divides them

PLAN = {
    **{f"blocks.*.attention.{name}": "colwise" for name in ("query", "key", "value")},
    "blocks.*.attention.dense": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class PlannedAttention(nn.Module):
    """Drops probabilities in three shapes, what the heads give, and the result."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.num_heads, -1)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0)
        y = y + self.drop((q @ k.mT).softmax(-1)) @ v
        rows = F.dropout((q @ k.mT).softmax(-1).flatten(0, 1), 0.2, self.training)
        y = y + (rows @ v.flatten(0, 1)).view(y.shape)
        return self.drop(self.dense(self.drop(y.transpose(1, 2).flatten(2))))


class PlannedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = PlannedAttention()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.drop(x))
        return x + self.drop(self.down(self.drop(torch.tanh(self.up(F.dropout(x, 0.1))))))


class Planned(nn.Module):
    """A model that a plan splits; elements are numbered in whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(PlannedBlock() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = F.dropout(self.embedding(ids), 0.1)
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()
