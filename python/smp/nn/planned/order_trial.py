"""A trial, before anything is split, in which order one matrix makes queries, keys and values.

Sizes and names do not show the order. So a copy of the module around the matrix runs with random
numbers: first with all features of the matrix, then with those that a rank would have. In the right
order the row behind the heads gets this rank's part of what it got of all features.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smp.nn.conv1d import is_conv1d
from smp.nn.planned.linear import has_hooks
from smp.nn.planned.runs import CannotTry, Record, random_features
from smp.nn.run_aside import run_aside

_SAMPLES, _LENGTH = 2, 5
_TOLERANCE = 1e-5  # of norms, in float64: code may compute in float32 inside
_CPU = torch.device("cpu")


class OrderTrial:
    """Runs a copy of a module with stand-ins for a column and its rows.

    The copy is in float64 on the CPU and its parameters are random; the module stays as it is.

    Args:
        owner: module whose forward takes hidden states first.
        column: path of the linear layer that makes queries, keys and values.
        rows: paths of the linear layers that it feeds.

    Attributes:
        numbers: attributes of the module that are whole numbers and that its code reads.

    Raises:
        CannotTry: the module cannot be copied, or does not run with hidden states alone.
    """

    def __init__(self, owner: nn.Module, column: str, rows: Sequence[str]) -> None:
        for path, part in owner.named_modules():
            if has_hooks(part):
                raise CannotTry(f"'{path or type(owner).__name__}' has hooks")
        self._column = column
        self._record = Record()
        self._own: Tensor | None = None
        self._num_columns = self._num_calls = 0
        self._copy = _copied(owner, {path: self._forward_of(path) for path in (column, *rows)})
        width = _sizes_of(owner.get_submodule(column))[0]
        self._args, self._kwargs = _arguments(
            self._copy.forward, random_features((_SAMPLES, _LENGTH, width), 0, torch.float64)
        )
        read: set[str] = set()
        cls = type(self._copy)
        self._copy.__class__ = _reading_class(cls, read)
        self._whole = self._run(None, {})
        self._copy.__class__ = cls
        self._whole.check()
        self.numbers = {name: n for name, n in whole_numbers(owner).items() if name in read}
        if self._num_columns == 0:
            raise CannotTry(f"it does not call '{column}'")

    def problem_of(
        self,
        rank: int,
        own: Tensor,
        attributes: Mapping[str, int],
        sizes: Mapping[str, Sequence[int]],
    ) -> str | None:
        """Tries the features of one rank.

        Args:
            rank: tensor-parallel rank.
            own: numbers of the features of the column that the rank has, in their order.
            attributes: values of attributes of the module on this rank.
            sizes: numbers of input features by rank, by path of the row.

        Returns:
            the difference from all features as the end of a sentence, or None.

        Raises:
            CannotTry: the runs cannot be compared.
        """
        return self._whole.problem_of(self._run(own, attributes), sizes, rank, _TOLERANCE)

    def _run(self, own: Tensor | None, attributes: Mapping[str, int]) -> Record:
        self._record, self._own, self._num_calls = Record(), own, 0
        before = {name: self._copy.__dict__[name] for name in attributes}
        self._copy.__dict__.update(attributes)
        try:
            run_aside(self._copy, self._call, self._args, self._kwargs)
        finally:
            self._copy.__dict__.update(before)
        return self._record

    def _call(self, *args: Any, **kwargs: Any) -> None:
        self._record.run(functools.partial(self._copy.forward, *args, **kwargs), _CPU)

    def _forward_of(self, path: str) -> Callable[[nn.Module, Tensor], Tensor]:
        """Returns the forward of the stand-in for a layer, which also gets the layer."""

        def forward(layer: nn.Module, input: Tensor) -> Tensor:
            self._num_calls += 1
            width = _sizes_of(layer)[1]
            made = random_features((*input.shape[:-1], width), self._num_calls, torch.float64)
            if path != self._column:
                self._record.given.append((path, input.detach().clone()))
                return made
            self._num_columns += 1
            return made if self._own is None else made.index_select(-1, self._own)

        return forward


def whole_numbers(module: nn.Module) -> dict[str, int]:
    """Returns the attributes of a module that are whole numbers other than 0."""
    return {name: n for name, n in module.__dict__.items() if n and type(n) is int}


def _reading_class(cls: type[nn.Module], read: set[str]) -> type[nn.Module]:
    """Returns a subclass that adds the names of attributes to a set when they are read."""

    def get(self: nn.Module, name: str) -> Any:
        read.add(name)
        return cls.__getattribute__(self, name)

    return type(cls.__name__, (cls,), {"__getattribute__": get})


def _copied(
    owner: nn.Module, forwards: Mapping[str, Callable[[nn.Module, Tensor], Tensor]]
) -> nn.Module:
    """Returns a copy of a module with random parameters, and with other forwards of some layers.

    Raises:
        CannotTry: the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for path, forward in forwards.items():
        layer = owner.get_submodule(path)
        made = copy.copy(layer)  # with the same parameters, which may be large and are not read
        made.__dict__["forward"] = functools.partial(forward, layer)
        memo[id(layer)] = made
    for module in owner.modules():
        if id(module) in memo:
            continue
        tensors = [*module._parameters.items(), *module._buffers.items()]
        for seed, (name, tensor) in enumerate(tensors):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = _in_double(name, tensor, seed)
    try:
        copied: nn.Module = copy.deepcopy(owner, memo)
    except Exception as error:  # whatever a module of a script holds
        raise CannotTry(f"it cannot be copied ({type(error).__name__}: {error})") from error
    return copied.eval()


def _in_double(name: str, tensor: Tensor, seed: int) -> Tensor:
    """Returns the counterpart of a parameter or buffer in a copy of its module.

    Raises:
        CannotTry: the tensor has no values, and random ones would not do.
    """
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    if isinstance(tensor, nn.Parameter) or (tensor.is_meta and tensor.is_floating_point()):
        if not tensor.is_floating_point():
            raise CannotTry(f"'{name}' is a parameter of {tensor.dtype}")
        generator = torch.Generator().manual_seed(seed)
        values = torch.rand(tensor.shape, generator=generator, dtype=dtype, device=_CPU) + 0.5
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(values, requires_grad=False) if is_parameter else values
    if tensor.is_meta:
        raise CannotTry(f"the buffer '{name}' has no values")
    return tensor.detach().to(_CPU, dtype, copy=True)


def _sizes_of(layer: nn.Module) -> tuple[int, int]:
    """Returns the numbers of input and output features of a linear layer."""
    out_features, in_features = layer.get_parameter("weight").shape
    return (out_features, in_features) if is_conv1d(layer) else (in_features, out_features)


def _arguments(
    forward: Callable[..., Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments of a forward: hidden states, and None where there is no default."""
    others = list(inspect.signature(forward).parameters.values())[1:]
    needed = [p for p in others if p.default is p.empty]
    num_more = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in needed)
    named = {p.name: None for p in needed if p.kind is p.KEYWORD_ONLY}
    return (hidden, *[None] * num_more), named
