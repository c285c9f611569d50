"""Models as people write them by hand: what they keep, share, hook and read.

Each pattern is a function that makes a module; its ``forward`` returns a loss, unless `LOSSES`
says where the loss is found. `calls.py` has those about arguments and
results, `hooks.py` those with hooks and reparametrised weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8
WORDS = 23
LENGTH = 6
BATCH = 2

Make = Callable[[], nn.Module]
PATTERNS: dict[str, Make] = {}
# Where the loss is, when ``forward`` does not return it: (output, unwrapped model) -> loss.
LOSSES: dict[str, Callable[[Any, nn.Module], Any]] = {}


def pattern(make: Make) -> Make:
    """Registers a pattern under the name of the function or class."""
    PATTERNS[make.__name__] = make
    return make


def inputs_of(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    """Makes one microbatch; every pattern takes these four."""
    return {
        "ids": torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator),
        "targets": torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator),
        "x": torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64).to(dtype),
        "y": torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64).to(dtype),
    }


def mse(a: Tensor, b: Tensor) -> Tensor:
    return F.mse_loss(a, b)


class Layer(nn.Module):
    """A linear map with a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.a = nn.Linear(width, 2 * width)
        self.b = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


def layers(count: int = 4) -> nn.ModuleList:
    return nn.ModuleList(Layer() for _ in range(count))


class Tower(nn.Module):
    """A row of layers; the base of most patterns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        return mse(self.body(x), y)


# ---- language models -------------------------------------------------------


class _CausalBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        mask = torch.tril(torch.ones(LENGTH, LENGTH))
        self.register_buffer("bias", mask.view(1, 1, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, 2, width // 2).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) / (width // 2) ** 0.5
        scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        mixed = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.c_proj(mixed)
        return x + self.mlp(self.ln_2(x))


@pattern
class NanoGPT(nn.Module):
    """Tied embeddings in a ModuleDict; returns logits and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "h": nn.ModuleList(_CausalBlock() for _ in range(3)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def logits(self, ids: Tensor) -> Tensor:
        parts: Any = self.transformer
        x = parts["wte"](ids) + parts["wpe"](torch.arange(ids.shape[1]))
        for block in parts["h"]:
            x = block(x)
        logits: Tensor = self.lm_head(parts["ln_f"](x))
        return logits

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        logits = self.logits(ids)
        loss = F.cross_entropy(logits.view(-1, WORDS), targets.view(-1), ignore_index=-1)
        return logits, loss


LOSSES["NanoGPT"] = lambda output, model: output[1]


@pattern
class Llama2C(NanoGPT):
    """The loss is left on the module; ``forward`` returns the logits."""

    last_loss: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.last_loss = None

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        logits = self.logits(ids)
        self.last_loss = F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))
        return logits


LOSSES["Llama2C"] = lambda output, model: model.last_loss


@pattern
class LanguageLSTM(nn.Module):
    """Packs a sequence through an LSTM, starts from states of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        zeros = torch.zeros(2, ids.shape[0], WIDTH, dtype=x.dtype)
        hidden, _ = self.lstm(self.embed(ids), (zeros, zeros))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


# ---- several networks in one, and parameters that the root reads ------------


@pattern
class MoCo(nn.Module):
    """A momentum encoder that follows the other, and a queue."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(*layers(3))
        self.key = nn.Sequential(*layers(3))
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", torch.linspace(-1, 1, 4 * WIDTH).view(WIDTH, 4))

    @torch.no_grad()
    def follow(self) -> None:
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            k.data = k.data * 0.9 + q.data * 0.1

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        q = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            self.follow()
            k = F.normalize(self.key(y), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1)
        self.queue[:, :2] = k.T.detach()
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


@pattern
class BYOL(nn.Module):
    """The target network is a moving average, updated in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(*layers(3))
        self.target = nn.Sequential(*layers(3))
        self.predictor = Layer()
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        with torch.no_grad():
            pairs = zip(self.online.parameters(), self.target.parameters(), strict=True)
            for online, target in pairs:
                target.mul_(0.9).add_(online, alpha=0.1)
            goal = self.target(y)
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(x)), goal, dim=-1).mean()


@pattern
class PenaltyOfAllParameters(Tower):
    """The root reads every parameter."""

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        penalty = sum(p.pow(2).sum() for p in self.parameters())
        return mse(self.body(x), y) + 1e-2 * penalty


@pattern
class TiedAutoencoder(nn.Module):
    """The decoder is the transposed weight of the encoder's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(WIDTH)) for _ in range(3))

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        code = x
        for encoder in self.encoders:
            code = torch.tanh(encoder(code))
        for encoder, bias in zip(reversed(self.encoders), self.biases, strict=True):
            code = F.linear(code, encoder.weight.t(), bias)
        return mse(code, y)


@pattern
class Gan(nn.Module):
    """Generator and discriminator; one loss for each, added."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(*layers(2))
        self.discriminator = nn.Sequential(*layers(2), nn.Linear(WIDTH, 1))

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        fake = self.generator(x)
        real = F.softplus(-self.discriminator(y)).mean()
        wrong = F.softplus(self.discriminator(fake.detach())).mean()
        return real + wrong + F.softplus(-self.discriminator(fake)).mean()


@pattern
class FrozenTeacher(nn.Module):
    """A copy in eval mode without gradients gives the goal."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(*layers(3))
        self.teacher = nn.Sequential(*layers(3)).requires_grad_(False).eval()

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        with torch.no_grad():
            goal = self.teacher(x)
        return mse(self.student(x), goal)


@pattern
class Gnn(nn.Module):
    """Messages along edges: ``index_add`` and a sparse product."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = layers(3)
        self.update = layers(3)

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        nodes = torch.cat([x, y, x * y])
        edges = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])
        values = torch.ones(6, dtype=x.dtype)
        adjacency = torch.sparse_coo_tensor(edges, values, (6, 6), is_coalesced=True)
        for message, update in zip(self.messages, self.update, strict=True):
            sent = message(nodes)[edges[0]]
            nodes = update(torch.zeros_like(nodes).index_add(0, edges[1], sent) + nodes)
            nodes = torch.sparse.mm(adjacency, nodes)
        return mse(nodes[:2], y)


class _SparseLayer(Layer):
    def forward(self, x: Tensor, adjacency: Any = None) -> Tensor:
        return super().forward(torch.sparse.mm(adjacency, x))


@pattern
class SparseArgument(Tower):
    """A sparse matrix is an argument of every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_SparseLayer() for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        adjacency = torch.eye(len(x), dtype=x.dtype).flip(0).to_sparse()
        for layer in self.layers:
            x = layer(x, adjacency=adjacency)
        return x


# ---- state on modules ------------------------------------------------------


class _AuxLayer(Layer):
    aux_loss: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.aux_loss = out.pow(2).mean()
        return out


@pattern
class AuxLossByAttribute(Tower):
    """The parent reads a loss that each layer left on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_AuxLayer() for _ in range(4))

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        loss = mse(self.body(x), y)
        for layer in self.layers:
            loss = loss + 0.1 * layer.aux_loss
        return loss


class _CountingLayer(Layer):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        with torch.no_grad():
            self.seen.mul_(0.5).add_(out.mean(0), alpha=0.5)
        return out


@pattern
class BufferReadByParent(Tower):
    """Updates a buffer in each layer, and uses it in the loss of the parent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_CountingLayer() for _ in range(4))

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        out = self.body(x)
        seen = torch.stack([layer.seen for layer in self.layers]).mean(0)
        return mse(out, y) + (out * seen).mean()


@pattern
class BufferReadBySibling(Tower):
    """A layer reads the buffer that another wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_CountingLayer() for _ in range(4))
        self.readers = layers(4)

    def body(self, x: Tensor) -> Tensor:
        for layer, reader in zip(self.layers, self.readers, strict=True):
            x = reader(layer(x) + layer.seen)
        return x


@pattern
class MovingAverageBuffer(Tower):
    """The root keeps a moving average of its features and uses it."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        out = self.body(x)
        with torch.no_grad():
            self.average.lerp_(out.mean(0), 0.3)
        return mse(out - self.average, y)


class _Recurrent(Layer):
    state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x if self.state is None else x + 0.5 * self.state)
        self.state = out.detach()
        return out


@pattern
class StateBetweenCalls(Tower):
    """Layers remember what they gave for the microbatch before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Recurrent() for _ in range(4))


class _Stateful(Layer):
    saved: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.saved is None:
            self.saved = super().forward(x)
            return self.saved
        x, self.saved = x + self.saved, None
        return super().forward(x)


@pattern
class CalledTwiceWithState(Tower):
    """Calls each layer twice; the first call leaves something for the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Stateful() for _ in range(4))

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        return mse(self.body(self.body(x)), y)


@pattern
class StepCounter(Tower):
    """A plain Python counter on a layer decides how much it does."""

    def __init__(self) -> None:
        super().__init__()

        class Warm(Layer):
            calls = 0

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return super().forward(x) * min(1.0, self.calls / 4)

        self.layers = nn.ModuleList(Warm() for _ in range(4))
