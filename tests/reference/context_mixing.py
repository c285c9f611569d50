"""Models with blocks that mix tokens outside of attention, or leave more than their result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_attention

from tests.reference.context_blocks import WIDTH, Attention, Block, Maker, Net, blocks
from tests.reference.context_parts import TimeFirstNet


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


class AgainBlock(BatchNormBlock):
    """A block that is told whether it has run before in this step."""

    def forward(self, x: Tensor, again: bool = False) -> Tensor:
        return super().forward(x / 2 if again else x)


class AgainNet(Net):
    """Calls its blocks twice; the second trial finds the first calls' graph."""

    def run(self, x: Tensor) -> Tensor:
        for again in (False, True):
            for block in self.blocks:
                x = block(x, again=again)
        return x


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
    """Adds a loss that only its backward shows, as some layers of experts do."""

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
        is_global: the hook writes to a list of the file instead of its own.
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
    """Adds a convolution behind a gate that is zero at first."""

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


_MIXED = " is another one for a part of the tokens"  # a query, a result, or a gradient

_LEFT = "it leaves tensors in attributes that depend on the tokens"


class DroppingAttention(Block):
    """A block whose attention drops elements."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.feed(self.attend(x, is_causal=True, dropout_p=self.dropout))


#: models of which no block computes parts, and the reason
WHOLE: dict[str, tuple[Maker, str]] = {
    "convolution": (lambda: Net(*blocks(ConvolutionBlock)), _MIXED),
    "loss in the file": (lambda: GlobalLossNet(*blocks(GlobalLossBlock)), _LEFT),
    "zero gate": (lambda: Net(*blocks(GatedBlock)), _MIXED),
    "batch norm": (lambda: Net(*blocks(BatchNormBlock)), _MIXED),
    "batch norm tried again": (lambda: AgainNet(*blocks(AgainBlock)), _MIXED),
    "cumulative sum": (lambda: Net(*blocks(CumulativeBlock)), _MIXED),
    "GRU": (lambda: Net(*blocks(RecurrentBlock)), _MIXED),
    "positions by index": (lambda: Net(*blocks(IndexedBlock)), _MIXED),
    "norm over the sequence": (lambda: Net(*blocks(SequenceNormBlock)), _MIXED),
    "length": (lambda: Net(*blocks(LengthBlock)), _MIXED),
    "pooling": (lambda: Net(*blocks(PoolingBlock)), _MIXED),
    "capacity": (lambda: Net(*blocks(CapacityBlock)), _MIXED),
    "loss in an attribute": (lambda: AuxiliaryNet(*blocks(AuxiliaryBlock)), _LEFT),
    "attention by hand": (lambda: Net(*blocks(OtherAttention, by_hand)), _MIXED),
    "imported attention": (lambda: Net(*blocks(OtherAttention, imported_attention)), _MIXED),
    "hook inside": (lambda: HookNet(False), _LEFT),
    "hook that writes to the file": (lambda: HookNet(True), _LEFT),
    "state": (lambda: Net(*blocks(StateBlock)), _LEFT),
    "count": (lambda: Net(*blocks(CountingBlock)), _LEFT),
    "dataclass": (lambda: DataclassNet(*blocks(DataclassBlock)), "its result is a Result"),
    "time first": (TimeFirstNet, _MIXED),
    "training only": (lambda: Net(*blocks(TrainingBlock)), _MIXED),
    "zero weights": (lambda: Net(*blocks(ConvolutionBlock, 1, True)), _MIXED),
    "argument in place": (lambda: InputNet(*blocks(InputBlock)), "it changes its arguments"),
    "loss of the backward": (lambda: Net(*blocks(HiddenLossBlock)), "its gradient is another one"),
    "hook of a gradient inside": (lambda: Net(*blocks(HookBlock)), "its gradient is another one"),
}
#: models whose blocks compute parts until they begin to mix tokens
LATER: dict[str, Maker] = {
    "flag": FlagNet,
    "attribute": SwitchedNet,
    "calls": lambda: Net(*blocks(ScheduleBlock)),
}
#: models that mix tokens far apart, change a list with tokens, or drop elements of attention
OTHERS: dict[str, Maker] = {
    "dilation": lambda: Net(*blocks(ConvolutionBlock, 64)),
    "list": lambda: ListNet(*blocks(ListBlock)),
    "dropout of attention": lambda: Net(*blocks(DroppingAttention)),
}
