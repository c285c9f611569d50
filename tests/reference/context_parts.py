"""Models of which each block computes parts of sequences: masks, forms of calls and of reading."""

from __future__ import annotations

import random
from collections import UserDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.reference.context_blocks import HEADS, WIDTH, Attention, Block, Maker, Net, blocks

# ---- masks: blocks compute parts


def band(length: int, window: int) -> Tensor:
    """Returns which of the last `window` tokens each token sees."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance < window)


class Masked(Block):
    """A block that gets a mask of its model, by the name of the argument or by position."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.feed(self.attend(x, attn_mask=mask))


class MaskedNet(Net):
    """Makes masks outside of its blocks.

    Args:
        kind: kind of the mask.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(Masked(), Masked(num_keys=2))
        self.kind = kind
        self.slopes = nn.Parameter(torch.tensor([0.5, 0.25, 0.125, 0.0625]))

    def mask(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        causal = band(length, length)
        if self.kind == "sliding":
            return band(length, 3)
        if self.kind == "prefix":
            return causal | (torch.arange(length) < 3)
        if self.kind == "packed":  # documents that end after each token 0, or after four tokens
            ends = (ids == 0) | (torch.arange(length) % 4 == 3)
            document = ends.long().cumsum(1) - ends.long()
            return (causal & (document[:, :, None] == document[:, None, :]))[:, None]
        distance = torch.arange(length)[:, None] - torch.arange(length)
        bias = -self.slopes[:, None, None] * distance.abs()  # of each head, as ALiBi has it
        return bias.masked_fill(~causal, float("-inf"))[None]

    def run(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, mask = self.embed(ids), self.mask(ids)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.loss(x, labels)


class Bidirectional(Block):
    causal = False


class CrossBlock(Block):
    """A block of a decoder that reads an encoder's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = Attention()
        self.norm3 = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        x = self.attend(x)
        return self.feed(x + self.cross(self.norm3(x), memory))


class CrossNet(Net):
    """Encoder and decoder; the encoder reads so many tokens less than the decoder."""

    def __init__(self, fewer: int) -> None:
        super().__init__(CrossBlock(), CrossBlock())
        self.encoder = nn.ModuleList([Bidirectional(), Bidirectional()])
        self.fewer = fewer

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        memory = self.embed(ids.flip(1)[:, self.fewer :])
        for block in self.encoder:
            memory = block(memory)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, memory)
        return self.loss(x, labels)


class OwnCheckpoint(Block):
    """A block whose author checkpoints a part of it."""

    is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = checkpoint(self.attend, x, use_reentrant=self.is_reentrant)
        return self.feed(attended)


class ReentrantCheckpoint(OwnCheckpoint):
    is_reentrant = True


class CheckpointedNet(Net):
    """A model that checkpoints its blocks itself.

    Args:
        is_reentrant: the form of the checkpoint.
    """

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__(Block(), Block())
        self.is_reentrant = is_reentrant

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return x


class CheckpointedHeadNet(Net):
    """A model that checkpoints its head.

    Args:
        is_reentrant: the form of the checkpoint.
    """

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__(Block(), Block())
        self.is_reentrant = is_reentrant

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = checkpoint(self.head, x, use_reentrant=self.is_reentrant)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# ---- forms of calls: blocks compute parts


class RandomBlock(Block):
    """Draws in Python whether it doubles its tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x if random.random() < 0.5 else x)


class TwiceNet(Net):
    """Calls each block twice, the second time with the tokens in reverse order."""

    def run(self, x: Tensor) -> Tensor:
        return super().run(super().run(x).flip(1))


class SharedNet(Net):
    """Holds its blocks in two lists."""

    def __init__(self) -> None:
        super().__init__(Block(), Block())
        self.others = nn.ModuleList(reversed(self.blocks))

    def run(self, x: Tensor) -> Tensor:
        for block in self.others:
            x = block(super().run(x))
        return x


class KeywordNet(Net):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x=x)
        return x


class TupleBlock(Block):
    """Returns its result with features of the tokens and a number."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor], int]:  # type: ignore[override]
        x = super().forward(x)
        return x, {"features": torch.tanh(x)}, 3


class TupleNet(Net):
    """Reads the features of all blocks in its loss."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        total = x.new_zeros(())
        for block in self.blocks:
            x, more, number = block(x)
            total = total + more["features"].cumsum(1).square().mean() * number
        return self.loss(x, labels) + total


class ReadingNet(Net):
    """Reads and changes what is between its blocks, in place too."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x[:, 0] = x[:, 1:].mean(1)
            x.mul_(1.5)
        return x


class ViewNet(Net):
    """Changes what is between its blocks through views, which it makes before and behind."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            rows, features = x.view(-1, WIDTH), x.transpose(1, 2)
            rows[::3] = 0.5 * rows[1::3].mean(0)
            features[:, 2] *= 2
            x = x + x.contiguous().mul_(0.5)
        return x


class GradientHookNet(Net):
    """Halves gradients between its blocks by a hook on a tensor."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x.register_hook(lambda grad: 0.5 * grad)
        return x


class LossNet(Net):
    """Computes what models compute behind their blocks: caps, masks, norms and losses."""

    def __init__(self) -> None:
        super().__init__(Block(), Block())
        self.norm = nn.RMSNorm(WIDTH)
        self.register_buffer("weights", torch.linspace(0.5, 2, self.head.out_features))
        self.weights: Tensor
        self.head.weight = self.embedding.weight

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        normed = self.norm(x) * x.pow(2).mean(-1, keepdim=True).add(1).rsqrt()
        logits = 5 * torch.tanh(self.head(normed).double() / 5)
        late = labels.clone()
        late[:, : labels.shape[1] // 2 + 1] = -100  # the first rank has no label
        rows, of_rows = logits.view(-1, logits.shape[-1]), labels.flatten()
        kept = (labels % 3 > 0)[..., None]
        each = F.cross_entropy(logits.transpose(1, 2), late, reduction="none")
        return sum(  # type: ignore[return-value]
            [
                F.cross_entropy(rows, late.flatten()),
                F.cross_entropy(rows, of_rows, weight=self.weights, label_smoothing=0.1),
                F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
                F.cross_entropy(rows, of_rows, reduction="sum") / 50,
                (each * torch.arange(labels.shape[1])).mean() / 10,
                (each / (1 + each.detach().max())).square().sum() / 10,
                F.nll_loss(F.log_softmax(logits, -1).flatten(0, 1), of_rows),
                1e-2 * logits.logsumexp(-1).square().mean(),
                ((x - normed) * kept).square().mean(),
                x.mean((1, 2)).square().sum() + x.sum(-1).mean(0).square().mean(),
                F.mse_loss(x, x.detach().roll(1, 1)),
            ]
        )


class FrozenNet(Net):
    """Trains the head, and what belongs to one block."""

    def __init__(self) -> None:
        super().__init__(Block(), Block(), Block())
        for module in (self.embedding, self.positions, self.blocks[0], self.blocks[2]):
            module.requires_grad_(False)


class TimeFirstNet(Net):
    """Layers of PyTorch with ``[S, B, H]``."""

    def __init__(self, batch_first: bool = False) -> None:
        layers = (
            nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=batch_first)
            for _ in range(2)
        )
        super().__init__(*layers)
        self.batch_first = batch_first

    def run(self, x: Tensor) -> Tensor:
        return (
            super().run(x) if self.batch_first else super().run(x.transpose(0, 1)).transpose(0, 1)
        )


class BackwardHookNet(Net):
    """Reads what hooks on whole blocks see: results, and their gradients."""

    def __init__(self) -> None:
        super().__init__(Block(), Block())
        for block in self.blocks:
            block.register_forward_hook(
                lambda module, args, result: result * 2 + result.mean(1, True)
            )
            block.register_full_backward_hook(lambda module, grads, of_result: (grads[0] * 0.5,))
        self.head.register_full_backward_hook(lambda module, grads, of_result: (grads[0] * 3,))


class SharedKeys(UserDict[str, Tensor]):
    """Keys that layers share, in a container of a class of its own."""


class SharedKeyBlock(Block):
    """A block of which the first leaves its keys to the others."""

    def forward(self, x: Tensor, shared: SharedKeys) -> Tensor:  # type: ignore[override]
        attention, normed = self.attention, self.norm1(x)
        heads = (HEADS, WIDTH // HEADS)
        q = attention.q(normed).unflatten(-1, heads).transpose(1, 2)
        if "keys" not in shared:
            shared["keys"] = attention.k(normed).unflatten(-1, heads).transpose(1, 2)
        read = shared["keys"]
        attended = F.scaled_dot_product_attention(q, read, read, is_causal=True)
        return self.feed(x + attention.out(attended.transpose(1, 2).flatten(2)))


class SharedKeyNet(Net):
    """Makes the keys of all blocks outside of them."""

    def __init__(self) -> None:
        super().__init__(SharedKeyBlock(), SharedKeyBlock())
        self.keys = nn.Linear(WIDTH, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        keys = self.keys(x).unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)
        shared = SharedKeys(keys=keys)
        for block in self.blocks:
            x = block(x, shared)
        return x


#: models of which each block computes parts
IN_PARTS: dict[str, Maker] = {
    "sliding": lambda: MaskedNet("sliding"),
    "cross": lambda: CrossNet(2),
    "views between": lambda: ViewNet(*blocks(Block)),
    "reentrant checkpointed blocks": lambda: CheckpointedNet(True),
    "causal": lambda: Net(*blocks(Block)),
    "grouped heads": lambda: Net(*blocks(Block, 1), *blocks(Block, 2)),
    "bidirectional": lambda: Net(*blocks(Bidirectional)),
    "packed": lambda: MaskedNet("packed"),
    "prefix": lambda: MaskedNet("prefix"),
    "bias of heads": lambda: MaskedNet("bias of heads"),
    "cross of equal lengths": lambda: CrossNet(0),
    "checkpoint inside": lambda: Net(*blocks(OwnCheckpoint)),
    "reentrant checkpoint inside": lambda: Net(*blocks(ReentrantCheckpoint)),
    "checkpointed blocks": lambda: CheckpointedNet(False),
    "checkpointed head": lambda: CheckpointedHeadNet(False),
    "reentrant checkpointed head": lambda: CheckpointedHeadNet(True),
    "random numbers of Python": lambda: Net(*blocks(RandomBlock)),
    "called twice": lambda: TwiceNet(*blocks(Block)),
    "shared": SharedNet,
    "keywords": lambda: KeywordNet(*blocks(Block)),
    "tuple": lambda: TupleNet(*blocks(TupleBlock)),
    "read between": lambda: ReadingNet(*blocks(Block)),
    "hooks of gradients": lambda: GradientHookNet(*blocks(Block)),
    "hooks of blocks": BackwardHookNet,
    "layers of PyTorch": lambda: TimeFirstNet(True),
    "losses": LossNet,
    "frozen": FrozenNet,
    "shared keys": SharedKeyNet,
}
