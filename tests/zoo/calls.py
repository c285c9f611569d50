"""Patterns of what modules get and return, and of how they are called."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.patterns import WIDTH, Layer, Tower, layers, mse, pattern

# ---- arguments and results -------------------------------------------------


class _WeightUser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(self.own(x) @ weight)


@pattern
class ChildsParameterAsArgument(nn.Module):
    """A parameter of one child is handed to others."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(WIDTH, WIDTH)
        self.users = nn.ModuleList(_WeightUser() for _ in range(4))

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        for user in self.users:
            x = user(x, self.shared.weight)
        return mse(x, y)


@pattern
class ReadsChildsWeight(Tower):
    """The parent computes with the weights of its children instead of calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        for layer, linear in zip(self.layers, self.maps, strict=True):
            x = layer(F.linear(x, linear.weight, linear.bias))
        return x


class _DictLayer(Layer):
    def forward(self, batch: dict[str, Any]) -> None:  # type: ignore[override]
        batch["x"] = super().forward(batch["x"])
        batch.setdefault("seen", []).append(batch["x"].mean())


@pattern
class DictChangedInPlace(Tower):
    """Layers return nothing; they change a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_DictLayer() for _ in range(4))

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        batch: dict[str, Any] = {"x": x}
        for layer in self.layers:
            layer(batch)
        return mse(batch["x"], y) + sum(batch["seen"])


class _ListLayer(Layer):
    def forward(self, x: Tensor, collected: list[Tensor]) -> Tensor:  # type: ignore[override]
        out = super().forward(x)
        collected.append(out.pow(2).mean())
        return out


@pattern
class ListFilledByLayers(Tower):
    """Layers append to a list that the parent handed to them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_ListLayer() for _ in range(4))

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        collected: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, collected)
        return mse(x, y) + 0.1 * torch.stack(collected).sum()


class _InPlaceLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(self.b(torch.tanh(self.a(x.clone()))))
        return x


@pattern
class TensorChangedInPlace(Tower):
    """Layers write into the tensor that they get."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_InPlaceLayer() for _ in range(4))

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        hidden = x * 1.0
        for layer in self.layers:
            layer(hidden)
        return mse(hidden, y)


class _ClosureLayer(Layer):
    def forward(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(function(x))


@pattern
class Closures(Tower):
    """Layers get a function that uses a tensor of the parent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_ClosureLayer() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(lambda value: value * self.scale, x)
        return x


class _GeneratorLayer(Layer):
    def forward(self, x: Tensor) -> Iterator[Tensor]:  # type: ignore[override]
        yield super().forward(x)
        yield self.a(x).mean()


@pattern
class Generators(Tower):
    """Layers are generators."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_GeneratorLayer() for _ in range(4))

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        extra = x.new_zeros(())
        for layer in self.layers:
            x, more = layer(x)
            extra = extra + more
        return mse(x, y) + extra


@dataclasses.dataclass
class Output:
    """A result that some layers return."""

    hidden: Tensor
    extra: Tensor | None = None


class _DataclassLayer(Layer):
    def forward(self, given: Output) -> Output:  # type: ignore[override]
        out = super().forward(given.hidden)
        return Output(out, out.mean() if given.extra is None else given.extra + out.mean())


@pattern
class Dataclasses(Tower):
    """Layers take and return a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_DataclassLayer() for _ in range(4))

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        value = Output(x)
        for layer in self.layers:
            value = layer(value)
        assert value.extra is not None
        return mse(value.hidden, y) + value.extra


# ---- control flow, functional calls, numbers -------------------------------


@pattern
class RoutedByData(nn.Module):
    """Routes each sample to the expert that its values choose."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({str(i): Layer() for i in range(4)})
        self.router = nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        weights = self.router(x).softmax(-1)
        rows = []
        for row, weight in zip(x, weights, strict=True):
            chosen = int(weight.argmax())
            rows.append(self.experts[str(chosen)](row[None])[0] * weight[chosen])
        return mse(torch.stack(rows), y)


@pattern
class StochasticDepth(Tower):
    """Python's random numbers leave layers out; the numbers are seeded in each call."""

    def body(self, x: Tensor) -> Tensor:
        numbers = random.Random(5)
        for layer in self.layers:
            if numbers.random() > 0.4:
                x = layer(x)
        return x


@pattern
class CheckpointInside(Tower):
    """Calls PyTorch's checkpointing itself."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@pattern
class FunctionalCall(Tower):
    """Runs layers with weights that are computed."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            scaled = {name: 0.5 * p for name, p in layer.named_parameters()}
            x = torch.func.functional_call(layer, scaled, (x,))
        return x


@pattern
class Vmap(Tower):
    """Layers run under vmap over the samples."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.func.vmap(layer)(x)
        return x


@pattern
class InnerGradient(Tower):
    """The loss holds a gradient of the output with respect to the input."""

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        x = x.detach().requires_grad_()
        out = self.body(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return mse(out, y) + slope.pow(2).mean()


@pattern
class ComplexParameters(nn.Module):
    """A spectral layer with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.before = layers(2)
        self.spectrum = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
        self.after = layers(2)

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        for layer in self.before:
            x = layer(x)
        x = torch.fft.irfft(torch.fft.rfft(x) * self.spectrum, n=WIDTH)
        for layer in self.after:
            x = layer(x)
        return mse(x, y)


@pattern
class BatchNorms(nn.Module):
    """Running statistics in a small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv1d(1 if i == 0 else 4, 4, 3, padding=1), nn.BatchNorm1d(4))
                for i in range(4)
            )
        )

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        return mse(self.blocks(x[:, None]).mean(1), y)


@pattern
class SharedLayer(nn.Module):
    """Uses one layer in several places, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        shared = Layer()
        self.layers = nn.ModuleList([shared, Layer(), shared, Layer()])

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return mse(x, y)


@pattern
class UnusedLayers(Tower):
    """Skips some layers, which never run."""

    def body(self, x: Tensor) -> Tensor:
        for layer in list(self.layers)[::2]:
            x = layer(x)
        return x


@pattern
class MethodsOfChildren(Tower):
    """The parent calls other methods of its children than ``forward``."""

    def __init__(self) -> None:
        super().__init__()

        class Two(Layer):
            def encode(self, x: Tensor) -> Tensor:
                return torch.tanh(self.a(x))

            def decode(self, x: Tensor) -> Tensor:
                return self.b(x)

        self.layers = nn.ModuleList(Two() for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            two: Any = layer
            x = x + two.decode(two.encode(x))
        return x
