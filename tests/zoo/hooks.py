"""Patterns with hooks on modules and tensors, and with reparametrised weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.zoo.patterns import WIDTH, Tower, layers, mse, pattern


class _Kept(Tower):
    """Adds what hooks have kept to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        self.kept.clear()
        loss = mse(self.body(x), y)
        values = self.kept.values() if isinstance(self.kept, dict) else self.kept
        return loss + sum(value.pow(2).mean() for value in values)


@pattern
class FeaturesInDict(_Kept):
    """Forward hooks keep the outputs of layers in a dictionary of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {}
        for name, layer in self.layers.named_children():
            layer.register_forward_hook(
                lambda module, args, out, name=name: self.kept.__setitem__(name, out)
            )


@pattern
class FeaturesInList(_Kept):
    """Forward hooks on inner layers keep features in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = []
        for layer in self.layers:
            layer.a.register_forward_hook(lambda module, args, out: self.kept.append(out))


@pattern
class ForwardHooksChangeOutputs(Tower):
    """Forward hooks return other values."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_forward_hook(lambda module, args, out: out * 0.5)
            layer.b.register_forward_hook(lambda module, args, out: out + 1.0)


@pattern
class PreHooksChangeInputs(Tower):
    """Forward pre-hooks, with and without keywords."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
            layer.a.register_forward_pre_hook(
                lambda module, args, kwargs: ((args[0] + 1.0,), kwargs), with_kwargs=True
            )


@pattern
class FullBackwardHooks(Tower):
    """Full backward hooks change gradients."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_full_backward_hook(_halved)
            layer.register_full_backward_pre_hook(lambda module, out: (out[0] * 1.5,))


def _halved(module: nn.Module, into: Any, out: Any) -> Any:
    return tuple(None if grad is None else grad * 0.5 for grad in into)


@pattern
class TensorHooks(Tower):
    """Hooks on tensors between layers, and on parameters."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.layers.parameters():
            parameter.register_hook(lambda grad: grad * 2.0)

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x.register_hook(lambda grad: grad * 0.5)
        return x


@pattern
class GradientsKeptByHooks(Tower):
    """Hooks on activations keep gradients on the root, which the next call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = x * self.scale
        x.register_hook(self.keep)
        return x

    def keep(self, grad: Tensor) -> None:
        self.scale = 1.0 + float(grad.abs().mean())


@pattern
class WeightNorm(Tower):
    """Weight normalisation by parametrization."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            parametrizations.weight_norm(layer.a)


@pattern
class OldWeightNorm(Tower):
    """Weight normalisation by a pre-hook, as older code has it."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            torch.nn.utils.weight_norm(layer.a)


@pattern
class SpectralNorm(Tower):
    """Spectral normalisation; its vectors are buffers that change in training."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            torch.nn.utils.spectral_norm(layer.a)


@pattern
class NewSpectralNorm(Tower):
    """Spectral normalisation by parametrization."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            parametrizations.spectral_norm(layer.a)


@pattern
class Pruned(Tower):
    """Half of some weights are pruned."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            prune.l1_unstructured(layer.a, "weight", amount=0.5)


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


@pattern
class Parametrized(nn.Module):
    """Weights are symmetric, and orthogonal, by parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers = layers(4)
        for linear in list(self.maps)[:2]:
            parametrize.register_parametrization(linear, "weight", _Symmetric())
        for linear in list(self.maps)[2:]:
            parametrizations.orthogonal(linear)

    def forward(self, ids: Tensor, targets: Tensor, x: Tensor, y: Tensor) -> Any:
        for linear, layer in zip(self.maps, self.layers, strict=True):
            x = layer(linear(x))
        return mse(x, y)
