"""A GPT-style model of plain torch blocks; every contender trains exactly these."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class GptShape:
    num_layers: int = 8
    hidden: int = 256
    num_heads: int = 4
    vocab_size: int = 4096
    seq_len: int = 128


class Embedding(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocab_size, shape.hidden)
        self.position = nn.Embedding(shape.seq_len, shape.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.position.weight[: ids.shape[1]]


class Block(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.norm1 = nn.LayerNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.proj = nn.Linear(shape.hidden, shape.hidden)
        self.norm2 = nn.LayerNorm(shape.hidden)
        self.up = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.down = nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attention = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attention.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    """Final norm and projection to the vocabulary: logits."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.hidden)
        self.proj = nn.Linear(shape.hidden, shape.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.norm(x))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class LossHead(Head):
    """Logits stay where they are made; the mean loss comes back."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return token_loss(super().forward(x), targets)


class Gpt(nn.Module):
    """Embedding, blocks and loss.

    Args:
        num_groups: the blocks are `nn.Sequential`s of equal length, so many; with as many groups
            as blocks, the blocks themselves.
    """

    def __init__(self, shape: GptShape, num_groups: int) -> None:
        super().__init__()
        self.embedding = Embedding(shape)
        blocks = [Block(shape) for _ in range(shape.num_layers)]
        size = shape.num_layers // num_groups
        self.groups = nn.ModuleList(
            nn.Sequential(*blocks[i : i + size]) if size > 1 else blocks[i]
            for i in range(0, shape.num_layers, size)
        )
        self.head = LossHead(shape)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        for group in self.groups:
            x = group(x)
        return self.head(x, targets)


def stage_module(shape: GptShape, stage_idx: int, num_stages: int) -> nn.Sequential:
    """Consecutive blocks as one stage: embedding in front of the first, logits after the last."""
    size = shape.num_layers // num_stages
    layers: list[nn.Module] = [Block(shape) for _ in range(size)]
    if stage_idx == 0:
        layers.insert(0, Embedding(shape))
    if stage_idx == num_stages - 1:
        layers.append(Head(shape))
    return nn.Sequential(*layers)


def make_batch(shape: GptShape, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(shape.vocab_size, (batch_size, shape.seq_len + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-4)
