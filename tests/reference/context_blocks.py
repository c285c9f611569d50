"""The block, its attention and the language model of which tests of parts of sequences are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 23
WIDTH = 12
HEADS = 4
Maker = Callable[[], nn.Module]


class Attention(nn.Module):
    """Attention of a user, by PyTorch's function.

    Args:
        num_keys: number of heads of keys and values.
        function: computes attention; None for ``F.scaled_dot_product_attention``, looked up late.
    """

    def __init__(
        self, num_keys: int = HEADS, function: Callable[..., Tensor] | None = None
    ) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, num_keys * size), nn.Linear(WIDTH, num_keys * size)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor, memory: Tensor | None = None, **options: Any) -> Tensor:
        read = x if memory is None else memory
        size = WIDTH // HEADS
        q = self.q(x).unflatten(-1, (-1, size)).transpose(1, 2)
        k, v = (f(read).unflatten(-1, (-1, size)).transpose(1, 2) for f in (self.k, self.v))
        if k.shape[1] != HEADS:
            options["enable_gqa"] = True
        attend = self.function or F.scaled_dot_product_attention
        return self.out(attend(q, k, v, **options).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of a decoder, to which others add.

    Attributes:
        causal: whether a token sees those before it only.
    """

    causal = True

    def __init__(self, num_keys: int = HEADS) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(num_keys)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def attend(self, x: Tensor, **options: Any) -> Tensor:
        options = options or {"is_causal": self.causal}
        return x + self.attention(self.norm1(x), **options)

    def feed(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.feed(self.attend(x))


class Net(nn.Module):
    """Token and position embeddings, blocks, a head and the mean loss of all tokens."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(2048, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.run(self.embed(ids)), labels)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) + self.positions.weight[: ids.shape[1]]

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def blocks(cls: type[nn.Module], *args: Any, **kwargs: Any) -> list[nn.Module]:
    return [cls(*args, **kwargs) for _ in range(2)]
