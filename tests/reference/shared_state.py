"""Models whose modules share more than arguments and results: attributes, containers, hooks.

Each `CASES` entry makes a model that takes a batch of shape [samples, 6] and returns a loss. Two of
its parts are large, so that two ranks have one each.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block; ``effect`` is called by its forward with the hidden state."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(6, width)
        self.down = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks in a row and a loss."""

    block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(type(self).block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * x).mean()


class AuxBlock(Block):
    """Keeps an auxiliary loss in an attribute, as mixtures of experts do."""

    aux_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        self.aux_loss = hidden.abs().mean()
        return x + self.down(hidden)


class AuxByAttribute(Stack):
    """The parent adds the auxiliary losses at its end, when other microbatches have passed."""

    block = AuxBlock

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        return loss + sum(block.aux_loss for block in self.blocks)


class ScaledBlock(Block):
    scale: Tensor | float = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class ParentWritesChild(Stack):
    """The parent sets an attribute of its children before it calls them."""

    block = ScaledBlock

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            block.scale = x.abs().mean() + i
        return super().forward(x)


class RecurrentBlock(Block):
    """Carries a state from call to call within one forward."""

    state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        if self.state is not None:
            hidden = hidden + self.state
        self.state = hidden
        return x + self.down(hidden)


class ScaleTakenBack(Stack):
    """The same, and takes it back when it is done: behind the forward all is as before."""

    block = ScaledBlock

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            block.scale = (2.0 + i) if i % 2 else x.abs().mean()
        loss = super().forward(x)
        for block in self.blocks:
            block.scale = 1.0
        return loss


class ScaleDeleted(Stack):
    """The parent deletes what it has set, so that the class's own value counts again."""

    block = ScaledBlock

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.scale = 2.0
        loss = super().forward(x)
        for block in self.blocks:
            del block.scale
        return loss + super().forward(x)


class StateOnSelf(Stack):
    block = RecurrentBlock

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.state = None
        super().forward(x)
        return super().forward(x)


class ClearingBlock(RecurrentBlock):
    def clear(self) -> None:
        del self.state
        self.state = None


class StateCleared(Stack):
    """Blocks carry a state from call to call; their parent clears it at the end (MagViT)."""

    block = ClearingBlock

    def forward(self, x: Tensor) -> Tensor:
        first = super().forward(x)
        loss = first + super().forward(x * first)
        for module in self.modules():
            if isinstance(module, ClearingBlock):
                module.clear()
        return loss


class PickyBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 + sum(self.notes))


class NotesEmptied(Stack):
    """The parent puts something into lists of its blocks, and takes it out again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = PickyBlock()

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[2].notes.append(0.5)
        loss = super().forward(x)
        self.blocks[2].notes.clear()
        return loss


class AssignedBufferBlock(Block):
    """Puts another tensor into the place of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach().mean(0)
        return super().forward(x)


class AssignedBuffer(Stack):
    block = AssignedBufferBlock

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * x).mean() * sum(block.last.abs().sum() for block in self.blocks)


class CountingBlock(Block):
    """Writes to a buffer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().abs().mean()
        return super().forward(x)


class BufferInPlace(Stack):
    """The parent reads such a buffer of its last block but one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = CountingBlock()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if isinstance(block, CountingBlock):
                x = x * block.seen
        return (x * x).mean()


class ReturningBlock(Block):
    """Returns a buffer too, to which its next call writes."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(2, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        torch.sin(x.detach(), out=self.last)
        return super().forward(x), self.last


class ReturnedBuffer(Stack):
    """The parent adds buffers that its blocks return, and that other microbatches write to."""

    block = ReturningBlock

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, last = block(x)
            x = x + last
        return x.pow(2).mean()


class ListBlock(Block):
    """Appends to a list that its parent has, too."""

    kept: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        self.kept.append(hidden.abs().mean().item())
        return x + self.down(hidden)


class SharedList(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[float] = []
        self.blocks[2] = ListBlock()
        self.blocks[2].kept = self.kept

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        return loss * sum(self.kept)


_collected: contextvars.ContextVar[dict[str, list[Tensor]] | None] = contextvars.ContextVar(
    "tests_collected", default=None
)


class CollectingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        collected = _collected.get()
        if collected is not None:
            collected["hidden"].append(hidden)
            collected.setdefault("means", []).append(hidden.mean())
        return x + self.down(hidden)


class ContextCollector(Stack):
    """A container in a context variable, as transformers captures outputs."""

    block = CollectingBlock

    def forward(self, x: Tensor) -> Tensor:
        collected: dict[str, list[Tensor]] = {"hidden": [x]}
        token = _collected.set(collected)
        loss = super().forward(x)
        _collected.reset(token)
        assert len(collected["hidden"]) == 5
        return loss + sum(h.abs().mean() for h in collected["hidden"]) + sum(collected["means"])


class HookedFeatures(Stack):
    """Hooks of inner modules keep features, of which the parent makes a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["features"] = features = {}
        for i, block in enumerate(self.blocks):
            block.up.register_forward_hook(lambda m, args, out, i=i: features.update({i: out}))

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        return loss + sum(feature.abs().mean() for feature in self.features.values())


class FrozenInForward(Stack):
    """Freezes a part and puts it into evaluation mode while it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            for parameter in block.up.parameters():
                parameter.requires_grad_(i % 2 == 0)
            self.norms[i % 2].train(i < 2)
            x = block(self.norms[i % 2](x))
        return (x * x).mean()


class ParameterAsArgument(Stack):
    """Takes a parameter from a child and hands it to another one (DeBERTa)."""

    class Reader(Block):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + table.mean(0)

    block = Reader

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.table.weight)
        return (x * x).mean()


class LeavingBlock(Block):
    """The first call of a microbatch leaves something for the second."""

    left: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.left is None:
            self.left = super().forward(x)
            return self.left
        x, self.left = x + self.left, None
        return super().forward(x)


class LeftForSecondCall(Stack):
    block = LeavingBlock

    def forward(self, x: Tensor) -> Tensor:
        first = super().forward(x)
        return first + super().forward(x * first)


class CountingCalls(Stack):
    """A stack of layers whose results depend on the number of their calls."""

    class Warming(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * min(1.0, self.calls / 6)

    block = Warming


class FeaturesOfRoot(Stack):
    """Hooks of layers write to a dictionary of the root, by way of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tensor] = {}
        for i, block in enumerate(self.blocks):
            block.register_forward_hook(lambda m, args, out, i=i: self.kept.update({i: out}))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(kept.abs().mean() for kept in self.kept.values())


class GradientForNext(Stack):
    """A hook on an activation keeps a number of the backward for the next forward."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = x * self.scale
        x.register_hook(self.keep)
        return (x * x).mean()

    def keep(self, grad: Tensor) -> None:
        self.scale = 1.0 + float(grad.abs().mean())


class MovingAverage(Stack):
    """The forward writes to parameters of a part that is not trained (BYOL)."""

    def __init__(self) -> None:
        super().__init__()
        self.target = Block()
        self.target.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            pairs = zip(self.blocks[0].parameters(), self.target.parameters(), strict=True)
            for online, target in pairs:
                target.mul_(0.9).add_(online, alpha=0.1)
            goal = self.target(x)
        for block in self.blocks:
            x = block(x)
        return ((x - goal) ** 2).mean()


class ParameterHooks(Stack):
    """Hooks of parameters change gradients."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.weight.register_hook(lambda grad: 2 * grad)


class Normalised(Stack):
    """Pre-hooks of linear layers make their weights, and write to buffers (spectral norm)."""

    class Block(Block):
        def __init__(self) -> None:
            super().__init__()
            torch.nn.utils.spectral_norm(self.up)
            torch.nn.utils.weight_norm(self.down)

    block = Block


CASES: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(
            AuxByAttribute,
            ParentWritesChild,
            ScaleTakenBack,
            ScaleDeleted,
            StateOnSelf,
            StateCleared,
            NotesEmptied,
            AssignedBuffer,
            BufferInPlace,
            ReturnedBuffer,
            SharedList,
        ),
        *(LeftForSecondCall, CountingCalls, FeaturesOfRoot, GradientForNext, MovingAverage),
        *(
            Normalised,
            ParameterHooks,
            ContextCollector,
            HookedFeatures,
            FrozenInForward,
            ParameterAsArgument,
        ),
    )
}


def make(case: str) -> nn.Module:
    """A model with reproducible weights, in float64."""
    torch.manual_seed(7)
    return CASES[case]().double()


def batch(step: int, samples: int = 8) -> Tensor:
    """Inputs of one step."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(samples, 6, generator=generator, dtype=torch.float64)


def train_alone(case: str, steps: int, microbatches: int) -> dict[str, Any]:
    """Losses, gradients by name of each step, and parameters and buffers at the end."""
    return train_plain(make(case), steps, microbatches)


def train_plain(model: nn.Module, steps: int, microbatches: int) -> dict[str, Any]:
    """The same of a model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, grads = [], []
    for step in range(steps):
        optimizer.zero_grad()
        for part in batch(step).chunk(microbatches):
            loss = model(part)
            (loss / microbatches).backward()
            losses.append(loss.item())
        grads.append(
            {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        )
        optimizer.step()
    return {
        "losses": losses,
        "grads": grads,
        "state": {name: value.clone() for name, value in model.state_dict().items()},
    }
