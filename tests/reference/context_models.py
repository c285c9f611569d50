"""Models with blocks that compute parts of sequences, and with blocks that cannot, by name.

Each is a plain module that gets token ids ``[B, S]`` and labels and returns the loss. What it
computes in one process is the reference.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_attention
from torch.utils.checkpoint import checkpoint

VOCABULARY = 23
WIDTH = 12
HEADS = 4


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


@dataclasses.dataclass
class Result:
    x: Tensor
    pooled: Tensor


class DataclassBlock(Block):
    def forward(self, x: Tensor) -> Result:  # type: ignore[override]
        x = super().forward(x)
        return Result(x, x.square())


class DataclassNet(Net):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, total = self.embed(ids), torch.zeros((), dtype=torch.float64)
        for block in self.blocks:
            result = block(x)
            x = result.x
            total = total + result.pooled.mean(1).square().sum()
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


# ---- what mixes tokens outside of attention: blocks compute whole sequences


class ConvolutionBlock(Block):
    """Adds a causal convolution over time.

    Args:
        dilation: distance of the tokens that it reads.
        is_zero: whether the weights are zero at first.
    """

    def __init__(self, dilation: int = 1, is_zero: bool = False) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 2, dilation=dilation, groups=WIDTH)
        self.dilation = dilation
        if is_zero:
            nn.init.zeros_(self.convolution.weight)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.transpose(1, 2), (self.dilation, 0))
        return super().forward(x + self.convolution(padded).transpose(1, 2))


class CumulativeBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * x.cumsum(1))


class RecurrentBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.gru(x)[0])


class IndexedBlock(Block):
    """Adds positions by their index."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2048, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table[: x.shape[1]])


class SequenceNormBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1))


class LengthBlock(Block):
    """Scales by the number of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (10 / x.shape[1]))


class PoolingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + torch.sigmoid(x.mean(1, keepdim=True))


class BatchNormBlock(Block):
    """Normalises each feature over all tokens of the batch, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))


class TrainingBlock(Block):
    """Centres tokens in training only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True) if self.training else x)


class CapacityBlock(Block):
    """Lets each of two experts take no more than its share of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x)
        tokens = x.flatten(0, 1)
        gates = self.router(tokens).softmax(-1)
        capacity = max(1, len(tokens) // 4)
        result = tokens
        for idx, expert in enumerate(self.experts):
            rows = gates[:, idx].topk(capacity).indices
            result = result.index_add(0, rows, expert(tokens[rows]) * gates[rows, idx, None])
        return result.view_as(x)


class AuxiliaryBlock(Block):
    """Leaves a loss about all of its tokens in an attribute."""

    auxiliary: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.auxiliary = x.softmax(-1).mean((0, 1)).square().sum()
        return x


class AuxiliaryNet(Net):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss = super().forward(ids, labels)
        return loss + sum(block.auxiliary for block in self.blocks)  # type: ignore[misc]


LOSSES: list[Tensor] = []


class GlobalLossBlock(Block):
    """Adds a loss about all of its tokens to a list of its file."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        LOSSES.append(x.softmax(-1).mean((0, 1)).square().sum())
        return x


class GlobalLossNet(Net):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        LOSSES.clear()
        loss = super().forward(ids, labels)
        return loss + sum(LOSSES)


class _AddLoss(torch.autograd.Function):
    """Returns its first argument; the backward gives a loss the gradient one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], torch.ones((), dtype=ctx.dtype)


class HiddenLossBlock(Block):
    """Has a loss of its own that only its backward shows, as some experts have it."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        loss = x.softmax(-1).mean((0, 1)).square().sum()
        added: Tensor = _AddLoss.apply(x, loss)  # type: ignore[no-untyped-call]
        return added


class HookBlock(Block):
    """Changes the gradient of its tokens by its norm."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if x.requires_grad:
            x.register_hook(lambda grad: grad / (1e-3 + grad.norm()))
        return x


class HookNet(Net):
    """Reads in its loss what a hook on a module inside of each block has seen.

    Args:
        is_global: the hook writes to a list of the file, not to one that belongs to it.
    """

    def __init__(self, is_global: bool) -> None:
        super().__init__(Block(), Block())
        self.seen = LOSSES if is_global else []
        seen = self.seen

        def keep(module: nn.Module, args: Any, result: Tensor) -> None:
            seen.append(result)

        def keep_in_file(module: nn.Module, args: Any, result: Tensor) -> None:
            LOSSES.append(result)

        for block in self.blocks:
            block.down.register_forward_hook(keep_in_file if is_global else keep)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.seen.clear()
        loss = super().forward(ids, labels)
        return loss + sum(x.square().sum() for x in self.seen) / ids.numel()


def by_hand(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


class OtherAttention(Block):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention = Attention(function=function)


class ListBlock(Block):
    """Replaces an item of a list among its arguments."""

    def forward(self, x: Tensor, state: list[Tensor]) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        state[0] = state[0] + x
        return x


class ListNet(Net):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        state = [x]
        for block in self.blocks:
            x = block(x, state)
        return self.loss(x + state[0].cumsum(1), labels)


class GatedBlock(ConvolutionBlock):
    """Has a convolution behind a gate that is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.transpose(1, 2), (1, 0))
        return Block.forward(self, x + self.gate * self.convolution(padded).transpose(1, 2))


class FlagNet(Net):
    """Tells its blocks from the second call on to mix tokens."""

    def __init__(self) -> None:
        super().__init__(FlagBlock(), FlagBlock())
        self.num_calls = 0

    def run(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        for block in self.blocks:
            x = block(x, mixes=self.num_calls > 1)
        return x


class FlagBlock(Block):
    def forward(self, x: Tensor, mixes: bool) -> Tensor:  # type: ignore[override]
        return super().forward(x + x.cumsum(1) if mixes else x)


class ScheduleBlock(Block):
    """Mixes tokens from its third call on."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x + x.cumsum(1) if self.num_calls > 2 else x)


class SwitchedNet(Net):
    """Sets an attribute of its blocks from the second call on."""

    def __init__(self) -> None:
        super().__init__(SwitchedBlock(), SwitchedBlock())
        self.num_calls = 0

    def run(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        for block in self.blocks:
            block.mixes = self.num_calls > 1  # type: ignore[assignment]
        return super().run(x)


class SwitchedBlock(Block):
    mixes = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.cumsum(1) if self.mixes else x)


class StateBlock(Block):
    """Adds what its call before has kept: the mean of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x + self.mean)
        self.mean = 0.5 * self.mean + x.detach().mean((0, 1))
        return result


class CountingBlock(Block):
    """Keeps the number of its tokens in a buffer and scales by it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x / (1 + self.count))
        self.count += x.shape[1]
        return result


class InputBlock(nn.Module):
    """Changes its argument in place, which its model reads again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        more = self.attention(x.clone(), is_causal=True)
        x.add_(more)
        return self.linear(x.clone())


class InputNet(Net):
    def run(self, x: Tensor) -> Tensor:
        x = x * 1
        for block in self.blocks:
            x = block(x) + x
        return x


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


def blocks(cls: type[nn.Module], *args: Any, **kwargs: Any) -> list[nn.Module]:
    return [cls(*args, **kwargs) for _ in range(2)]


Maker = Callable[[], nn.Module]
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
    "frozen": FrozenNet,
}
_QUERY = "the query of its attention is another one for a part of the tokens"
_RESULT = "result is another one for a part of the tokens"
_LEFT = "it leaves tensors in attributes that depend on the tokens"
#: models of which no block computes parts, and the reason
WHOLE: dict[str, tuple[Maker, str]] = {
    "convolution": (lambda: Net(*blocks(ConvolutionBlock)), _QUERY),
    "loss in the file": (lambda: GlobalLossNet(*blocks(GlobalLossBlock)), _LEFT),
    "zero gate": (lambda: Net(*blocks(GatedBlock)), _QUERY),
    "batch norm": (lambda: Net(*blocks(BatchNormBlock)), _QUERY),
    "cumulative sum": (lambda: Net(*blocks(CumulativeBlock)), _QUERY),
    "GRU": (lambda: Net(*blocks(RecurrentBlock)), _QUERY),
    "positions by index": (lambda: Net(*blocks(IndexedBlock)), _QUERY),
    "norm over the sequence": (lambda: Net(*blocks(SequenceNormBlock)), _QUERY),
    "length": (lambda: Net(*blocks(LengthBlock)), _QUERY),
    "pooling": (lambda: Net(*blocks(PoolingBlock)), _RESULT),
    "capacity": (lambda: Net(*blocks(CapacityBlock)), _RESULT),
    "loss in an attribute": (lambda: AuxiliaryNet(*blocks(AuxiliaryBlock)), _LEFT),
    "attention by hand": (lambda: Net(*blocks(OtherAttention, by_hand)), _RESULT),
    "imported attention": (lambda: Net(*blocks(OtherAttention, imported_attention)), _RESULT),
    "hook inside": (lambda: HookNet(False), _LEFT),
    "hook that writes to the file": (lambda: HookNet(True), _LEFT),
    "state": (lambda: Net(*blocks(StateBlock)), _LEFT),
    "count": (lambda: Net(*blocks(CountingBlock)), _LEFT),
    "dataclass": (lambda: DataclassNet(*blocks(DataclassBlock)), "its result is a Result"),
    "time first": (TimeFirstNet, _QUERY),
    "training only": (lambda: Net(*blocks(TrainingBlock)), _QUERY),
    "zero weights": (lambda: Net(*blocks(ConvolutionBlock, 1, True)), _QUERY),
    "argument in place": (lambda: InputNet(*blocks(InputBlock)), "it changes its arguments"),
}
#: models whose blocks compute parts until they begin to mix tokens
LATER: dict[str, Maker] = {
    "flag": FlagNet,
    "attribute": SwitchedNet,
    "calls": lambda: Net(*blocks(ScheduleBlock)),
}
#: models whose blocks a trial takes for others, because only their backward mixes tokens
UNSEEN: dict[str, Maker] = {
    "loss of the backward": lambda: Net(*blocks(HiddenLossBlock)),
    "hook of a gradient inside": lambda: Net(*blocks(HookBlock)),
}
MODELS: dict[str, Maker] = {
    **IN_PARTS,
    **{name: make for name, (make, _) in WHOLE.items()},
    **LATER,
    **UNSEEN,
    "dilation": lambda: Net(*blocks(ConvolutionBlock, 64)),
    "list": lambda: ListNet(*blocks(ListBlock)),
}


def build(name: str) -> nn.Module:
    """Makes a model in float64 and seeds Python's generator; each call gives the same weights."""
    torch.manual_seed(3)
    random.seed(3)
    return MODELS[name]().double()


def batch_of(step: int, lengths: tuple[int, ...], num_samples: int) -> dict[str, Tensor]:
    """Makes the batch of a step: ids and labels ``[B, S]``, of another length in each step."""
    generator = torch.Generator().manual_seed(step)
    shape = (num_samples, lengths[step % len(lengths)])
    ids, labels = (torch.randint(VOCABULARY, shape, generator=generator) for _ in range(2))
    return {"ids": ids, "labels": labels}
