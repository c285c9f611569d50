"""Small module trees, each for one rule of the boundary between ranks.

Each is built with `place`, which puts modules made inside of it on another rank; its ``forward``
takes ``x`` of ``[rows, 4]`` and returns a scalar. Conditions besides the numbers are asserted in
``forward``, so they are checked in one process as well as on several ranks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.reference.models import Place

WIDTH = 4


class Away(nn.Linear):
    """A linear map for another rank."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)


class Rule(nn.Module):
    """Two remote modules and a head; `forward` is the rule."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.head = Away()
        with place(1):
            self.first = self.make_first()
            self.second = self.make_second()

    def make_first(self) -> nn.Module:
        return Away()

    def make_second(self) -> nn.Module:
        return Away()

    def end(self, x: Tensor) -> Tensor:
        return torch.tanh(self.head(x)).square().mean()


# ---- results and arguments that are not used --------------------------------


class _Wasteful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.wasted = Away(), Away()

    def forward(self, x: Tensor, ignored: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.used(x), self.wasted(x), x * 2


class UnusedOutputsAndArguments(Rule):
    def make_first(self) -> nn.Module:
        return _Wasteful()

    def forward(self, x: Tensor) -> Tensor:
        used, _, _ = self.first(x, self.second(x))
        return self.end(used)


class _Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Away()

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
        y = self.inner(x)
        return y.sin(), {"cos": y.cos()}, [y * 3, y.detach()]


class SeveralOutputsThatNeedGradients(Rule):
    def make_first(self) -> nn.Module:
        return _Split()

    def forward(self, x: Tensor) -> Tensor:
        sin, cos, (triple, constant) = self.first(x)
        assert sin.requires_grad and triple.requires_grad and not constant.requires_grad
        return self.end(sin * cos["cos"] + self.second(triple) + constant)


class UsedBySomeMicrobatchesOnly(Rule):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.second(y)
        return self.end(z if float(x.sum()) > 0 else x)


# ---- in place ----------------------------------------------------------------


class InPlaceOnResults(Rule):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        same = y
        y += 1.0
        y /= 2
        y.masked_fill_(x > 0.8, 0.5)
        y.sub_(self.second(x))
        y *= x
        assert same is y
        return self.end(self.second(y))


class InPlaceOnViewsOfResults(Rule):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y[:, :2] *= 0.5
        y[0] = 1.0
        y.view(-1, 2, 2)[:, 0].add_(x[:, :2])
        for row in y.unbind(0)[:0]:
            row.zero_()
        y.t()[3].copy_(x[:, 0])
        return self.end(self.second(y))


class InPlaceAfterTheCall(Rule):
    """A callee has to see its argument as it was when it was called."""

    def make_first(self) -> nn.Module:
        return _Shift()

    def make_second(self) -> nn.Module:
        return _Shift()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        before = self.second(y)
        y.mul_(-3.0)
        after = self.second(y)
        return self.end(before + 0.5 * after)


class _Shift(nn.Module):
    """Saves nothing for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + self.bias


class ModuleThatWritesIntoItsInput(Rule):
    """The first thing in a remote module is ``ReLU(inplace=True)``; the caller sees it."""

    def make_second(self) -> nn.Module:
        return nn.Sequential(nn.ReLU(inplace=True), Away())

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.second(y)
        assert float(y.detach().min()) >= 0.0, "the caller's tensor is the one that was written"
        own = torch.sin(x)
        w = self.second(own)
        assert float(own.min()) >= 0.0
        return self.end(y + z + w + own)


class ModuleThatAddsToItsInput(Rule):
    """A tensor without gradient gets one by what is written into it."""

    def make_second(self) -> nn.Module:
        return _Adder()

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        result = self.second(y)
        assert result is y and y.requires_grad
        return self.end(self.first(y))


class _Adder(_Shift):
    def forward(self, x: Tensor) -> Tensor:
        x += self.bias
        return x


# ---- identity of tensors -----------------------------------------------------


class PassThroughIsTheCallersObject(Rule):
    def make_second(self) -> nn.Module:
        return _Passer()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        (z, again), own, fresh = self.second(y, x)
        assert z is y and again is y and own is x and fresh is not y
        return self.end(z + fresh + own)


class _Passer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Away()
        self.identity = nn.Sequential(nn.Identity(), nn.Dropout(0.0))

    def forward(self, a: Tensor, b: Tensor) -> Any:
        return (self.identity(a), a), b, self.inner(a)


class TheSameTensorTwice(Rule):
    def make_second(self) -> nn.Module:
        return _Twins()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        out, again = self.second(y, y, keyword=y)
        assert out is again
        return self.end(out + again)


class _Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, a: Tensor, b: Tensor, keyword: Tensor) -> tuple[Tensor, Tensor]:
        assert a is b and keyword is a
        y = self.bilinear(a, b) + keyword
        return y, y


class ResultThatIsAViewOfAnArgument(Rule):
    """A case that may be refused, but a write into the view must not be lost."""

    def make_second(self) -> nn.Module:
        return _Viewer()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        half, _ = self.second(y)
        half.mul_(3.0)
        return self.end(y)


class _Viewer(_Shift):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :2], self.bias * 2


class ResultsThatShareMemory(Rule):
    """A case that may be refused, but a write into one must show in the other."""

    def make_second(self) -> nn.Module:
        return _Overlap()

    def forward(self, x: Tensor) -> Tensor:
        whole, part = self.second(x)
        part.mul_(3.0)
        return self.end(self.first(whole))


class _Overlap(_Shift):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2 + self.bias
        return y, y[:, 1:3]


class ContainerThatTheCalleeFills(Rule):
    """A case that may be refused, but values put into the container must not be lost."""

    def make_second(self) -> nn.Module:
        return _Filler()

    def forward(self, x: Tensor) -> Tensor:
        seen: dict[str, Tensor] = {}
        y = self.second(x, seen)
        return self.end(y + seen["hidden"])


class _Filler(_Shift):
    def forward(self, x: Tensor, seen: dict[str, Tensor]) -> Tensor:
        seen["hidden"] = x * self.bias
        return x + self.bias


# ---- what a result can be asked ----------------------------------------------


class ResultsAreTensors(Rule):
    """Whatever looks at a result sees the data."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        assert isinstance(y, Tensor) and y.shape == x.shape and y.dtype == x.dtype
        assert y.device == x.device and y.requires_grad and not y.is_leaf and y.grad_fn is not None
        assert y.stride() == (WIDTH, 1) and y.is_contiguous() and y.storage_offset() == 0
        assert y.dim() == 2 and len(y) == y.size(0) and y.numel() == x.numel()
        data = y.detach()
        assert data.data_ptr() != 0
        values = data.tolist()
        assert values == data.numpy().tolist() == copy.deepcopy(data).tolist()
        assert values == [row.tolist() for row in data]
        assert float(data[0, 0]) == values[0][0] and data[0, 0].item() == values[0][0]
        assert ("tensor" in repr(y)) and f"{float(data.sum()):.3f}" in f"{data.sum():.3f}"
        assert bool((y == y).all()) and torch.equal(data, torch.tensor(values, dtype=x.dtype))
        z = self.second(y)
        parts = torch.cat([y, z]).split(len(x))
        stacked = torch.stack([*parts, y + z], dim=1)
        first, *_ = stacked.unbind(1)
        return self.end(first + torch.einsum("nkw->nw", stacked) + torch.where(y > 0, y, z))


class HooksOnResults(Rule):
    """Tensor hooks change gradients; ``retain_grad`` keeps them."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.register_hook(lambda grad: grad * 3)
        y.retain_grad()
        z = self.second(y)
        z.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return self.end(z + y)


class HooksOnModules(Rule):
    """Forward hooks of a remote module run at the caller, see and replace values."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.first.register_forward_hook(lambda module, args, output: output + args[0])
        self.second.register_forward_hook(self.collect)

    def collect(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen.append(output)

    def forward(self, x: Tensor) -> Tensor:
        self.seen: list[Tensor] = []
        y = self.second(self.first(x))
        assert self.seen[0] is y
        return self.end(y + self.seen.pop())


class RecomputedAtTheCaller(Rule):
    """``torch.utils.checkpoint`` around remote modules, and inside of one."""

    def make_second(self) -> nn.Module:
        return _Checkpointed()

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda t: self.second(torch.sin(self.first(t))), x, use_reentrant=False)
        return self.end(y)


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Away()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda t: torch.sigmoid(self.inner(t)), x, use_reentrant=False)
        return y


class NoGradInside(Rule):
    """A call without gradients between calls with them."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            frozen = self.second(y)
        assert not frozen.requires_grad and y.requires_grad
        return self.end(self.second(y) * torch.sigmoid(frozen))


# ---- how modules are written --------------------------------------------------


class GeneratorExpressions(Rule):
    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.layers = nn.ModuleList()
        for index in (1, 0, 1):
            with place(index):
                self.layers.append(Away())

    def forward(self, x: Tensor) -> Tensor:
        y = sum(layer(x) for layer in self.layers)
        y = functools.reduce(lambda value, layer: layer(value), self.layers, y)
        outputs = list(map(self.first, (x, y)))
        mean = next(value.mean() for value in self.walk(outputs))
        return self.end(torch.stack([self.second(t) for t in outputs]).sum(0) * mean)

    def walk(self, values: list[Tensor]) -> Iterator[Tensor]:
        for value in values:
            yield self.second(value)


class SuperForward(Rule):
    def make_second(self) -> nn.Module:
        return _Derived()

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.second(self.first(x)))


class _Derived(nn.Linear):
    """A layer whose forward calls the inherited forward."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 + x


class OwnCall(Rule):
    """A class that overrides ``__call__``, as layers of transformers do."""

    def make_second(self) -> nn.Module:
        return _Caller()

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.second(self.first(x), double=True))


class _Caller(Away):
    def __call__(self, x: Tensor, double: bool = False) -> Any:
        return super().__call__(x * (2 if double else 1))


class FunctionsOfModules(Rule):
    """A function gets the module and reads it; no submodule is called for it."""

    def make_second(self) -> nn.Module:
        return _Functional()

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.second(self.first(x)))


def _scaled(module: Any, x: Tensor) -> Tensor:
    return x @ module.weight * module.scaling


class _Functional(Away):
    def __init__(self) -> None:
        super().__init__()
        self.scaling = 0.25
        self.function: Callable[..., Tensor] = _scaled

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x) + self.bias
