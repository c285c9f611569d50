"""Models without a configuration made small by rule, before or after they are built."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.rules import LAYERS

_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
_CHANCE = re.compile(r"(^|_)drop(out)?(_|$)")
_HIDDEN = 64  # of wide classifiers
_WIDE = 1024


def without_randomness(model: nn.Module) -> None:
    """Sets every probability with which training leaves out something to zero."""
    for module in model.modules():
        names = [name for name in vars(module) if _CHANCE.search(name)]
        if isinstance(module, _DROPOUTS) or type(module).__name__ == "StochasticDepth":
            names.append("p")
        for name in names:
            if isinstance(getattr(module, name), float):
                setattr(module, name, 0.0)


def keep_few_of_equal_layers(model: nn.Module) -> None:
    """Keeps `LAYERS` of neighbours in a list that have one class and the same shapes."""
    for module in list(model.modules()):
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > LAYERS:
            _shorten(module)


def _shorten(container: nn.Module) -> None:
    kept: list[tuple[str, nn.Module]] = []
    run: list[Any] = []
    for name, child in container.named_children():
        form = _form(child)
        run = [*run, form] if run and run[-1] == form else [form]
        if len(run) <= LAYERS or not form[1]:
            kept.append((name, child))
    if len(kept) == len(container._modules):
        return
    container._modules.clear()
    numbered = isinstance(container, nn.ModuleList)
    for index, (name, child) in enumerate(kept):
        container.add_module(str(index) if numbered else name, child)


def _form(module: nn.Module) -> tuple[Any, ...]:
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    return type(module), shapes


def narrow_classifiers(model: nn.Module) -> None:
    """Wide hidden layers between linear maps of one `nn.Sequential` become narrow."""
    for module in model.modules():
        if not isinstance(module, nn.Sequential):
            continue
        linears = [(name, m) for name, m in module.named_children() if type(m) is nn.Linear]
        for (first, before), (second, after) in zip(linears, linears[1:], strict=False):
            if before.out_features == after.in_features >= _WIDE:
                before = module._modules[first]  # type: ignore[assignment]
                bias = before.bias is not None
                module._modules[first] = nn.Linear(before.in_features, _HIDDEN, bias)
                module._modules[second] = nn.Linear(_HIDDEN, after.out_features, bias)


def size_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@contextlib.contextmanager
def _recorded(cls: type, seen: dict[str, Any]) -> Iterator[None]:
    """Keeps what the constructor of a class gets."""
    original = cls.__init__  # type: ignore[misc]
    signature = inspect.signature(original)

    @functools.wraps(original)
    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        if not seen:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            seen.update({k: v for k, v in bound.arguments.items() if k not in ("self", "kwargs")})
        original(self, *args, **kwargs)

    cls.__init__ = constructor  # type: ignore[misc]
    try:
        yield
    finally:
        cls.__init__ = original  # type: ignore[misc]


def arguments_of(make: Callable[[], nn.Module]) -> dict[str, Any]:
    """Returns the arguments that the class's constructor gets in the end, with its defaults."""
    seen: dict[str, Any] = {}
    # Callers keep what comes out, so models that are built later must not see that it was made.
    with torch.random.fork_rng([]), _recorded(type(without_values(make)), seen):
        without_values(make)
    return seen


def without_values(make: Callable[[], nn.Module]) -> nn.Module:
    """A model on the meta device, unless its constructor computes with values of tensors."""
    try:
        with torch.device("meta"):
            return make()
    except NotImplementedError:
        return make()


def shallow(value: Any) -> Any:
    """Depths, nested or not: at most `LAYERS`."""
    if isinstance(value, (list, tuple)):
        return type(value)(shallow(item) for item in value)
    return min(value, LAYERS) if type(value) is int else value


def squares(value: Any) -> Tensor:
    """A mean of squares over every tensor of an output, or the sum of the losses in it."""
    from tests.zoo.recipes import loss_of, tensors_in

    tensors = tensors_in(value)
    if tensors and all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack(tensors).sum()
    return loss_of(value, False, False)
