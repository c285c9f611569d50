"""Follows values of tensors that have only shapes, as far as arguments and buffers determine them.

Models look at masks, sizes of images and places of special tokens to choose their way. Such values
come from the arguments of the call, from buffers and from constants, by a few small operators,
which are run for real beside the operators on shapes. Values that depend on a parameter are
unknown. Three guesses help: they are finite, choices by them are even (which experts tokens are
sent to), and random numbers are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from smp.modules.operators import written_tensors

_aten = torch.ops.aten
_CPU = torch.device("cpu")

# Size of the largest tensor whose values are followed.
_LARGEST_BYTES = 1 << 25
_MASKS = (torch.bool, torch.uint8)


class KnownValues:
    """Runs operators on tensors without memory, and on their values where these are known."""

    def __init__(self) -> None:
        self._values = WeakIdKeyDictionary()
        # Memory of outdated values, by address.
        self._stale: dict[int, Any] = {}

    def add(self, tensor: Tensor, value: Tensor) -> None:
        """Notes the values of a tensor without memory.

        Args:
            tensor: tensor on any device.
            value: a real tensor; it is copied.
        """
        if type(tensor) is FakeTensor and _can_be_followed(value):
            with unset_fake_temporarily():
                self._values[tensor] = value.detach().to(_CPU, copy=True)

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs ``func(*args, **kwargs)``; operators that read values work if these are known."""
        values = self._all_values(args, kwargs, written_tensors(func, args, kwargs))
        if values is None:
            return self._without_values(func, args, kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            return _run_for_real(func, *values)
        if torch.Tag.dynamic_output_shape in func.tags:
            made = _run_for_real(func, *values)
            device = next((t.device for t in _tensors((args, kwargs))), _CPU)
            result = pytree.tree_map_only(Tensor, lambda t: _shape_of(t, device), made)
            self._note(result, made)
            return result
        result = func(*args, **kwargs)
        is_small = all(map(_is_small, _tensors(result)))
        try:
            made = _run_for_real(func, *values) if is_small else None
        except Exception:  # the model itself will raise any error
            made = None
        if made is None:
            self._forget(written_tensors(func, args, kwargs))
        else:
            self._note(result, made)
        return result

    def numbers(self, args: Sequence[Any]) -> Sequence[Any]:
        """Returns arguments with numbers instead of one-element tensors in lists."""
        if not args or not isinstance(args[0], list | tuple):
            return args
        return (pytree.tree_map_only(FakeTensor, self._number, args[0]), *args[1:])

    def _number(self, tensor: FakeTensor) -> Any:
        value = self._value(tensor)
        if value is None or value.numel() != 1:
            return tensor
        with unset_fake_temporarily():
            return value.item()

    def _without_values(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        self._forget(written_tensors(func, args, kwargs))
        if func is _aten.index.Tensor:
            args = (args[0], self._places(args[1]))
        elif func is _aten.masked_select.default and (mask := self._value(args[1])) is not None:
            shape = torch.broadcast_shapes(args[0].shape, mask.shape)
            with unset_fake_temporarily():
                count = int(mask.expand(shape).sum())
            return args[0].new_empty(count)
        result = func(*args, **kwargs)
        if func._overloadpacket in _CHOICES:
            places = result if isinstance(result, Tensor) else result[-1]
            chosen = _even_choices(func, args, kwargs, places)
            if chosen is not None and places.dtype == chosen.dtype:
                self._note(places, chosen)
        elif func is _aten.isnan.default or func is _aten.isinf.default:
            self._note_finite(result)
        return result

    def _note_finite(self, is_strange: Tensor) -> None:
        if _is_small(is_strange):
            with unset_fake_temporarily():
                value = torch.zeros(is_strange.shape, dtype=torch.bool)
            self._note(is_strange, value)

    def _places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns indices with known masks replaced by numbers."""
        found: list[Tensor | None] = []
        for index in indices:
            mask = None if index is None or index.dtype not in _MASKS else self._value(index)
            if mask is None:
                found.append(index)
                continue
            assert index is not None
            with unset_fake_temporarily():
                places = mask.nonzero(as_tuple=True)
            for place in places:
                made = _shape_of(place, index.device)
                self._note(made, place)
                found.append(made)
        return found

    def _all_values(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], written: Sequence[Tensor]
    ) -> tuple[Any, Any] | None:
        """Returns the arguments with values for tensors; None if one is missing."""
        values: dict[int, Tensor] = {}
        for tensor in _tensors((args, kwargs)):
            value = self._value(tensor)
            if value is None or (value is tensor and any(other is tensor for other in written)):
                return None
            values[id(tensor)] = value
        filled: tuple[Any, Any] = pytree.tree_map_only(
            Tensor, lambda t: values[id(t)], (args, dict(kwargs))
        )
        for name in ("device", "pin_memory"):
            if filled[1].get(name) is not None:
                filled[1][name] = _CPU if name == "device" else False
        return filled

    def _value(self, tensor: Tensor) -> Tensor | None:
        if type(tensor) is not FakeTensor:
            is_constant = type(tensor) is Tensor and tensor.device == _CPU
            return tensor if is_constant and _can_be_followed(tensor) else None
        value: Tensor | None = self._values.get(tensor)
        return None if value is None or _address(value) in self._stale else value

    def _note(self, result: Any, made: Any) -> None:
        for tensor, value in zip(_tensors(result), _tensors(made), strict=True):
            if type(tensor) is FakeTensor and tensor.shape == value.shape:
                self._values[tensor] = value

    def _forget(self, written: Sequence[Tensor]) -> None:
        for tensor in written:
            value = self._values.get(tensor) if type(tensor) is FakeTensor else None
            if value is not None:
                self._stale[_address(value)] = value.untyped_storage()


def _can_be_followed(value: Tensor) -> bool:
    return (
        not value.is_meta
        and value.layout == torch.strided
        and not value.is_quantized
        and _is_small(value)
    )


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= _LARGEST_BYTES


# Operators that choose, with the position of their argument ``dim`` and its default.
_CHOICES: dict[Any, tuple[int, int | None]] = {
    _aten.topk: (2, -1),
    _aten.sort: (1, -1),
    _aten.argmax: (1, None),
    _aten.argmin: (1, None),
    _aten.max: (1, None),
    _aten.min: (1, None),
}


def _even_choices(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], places: Tensor
) -> Tensor | None:
    """Returns places that an operator would return if each choice were taken equally often.

    Args:
        func, args, kwargs: the call; ``args[0]`` are the scores.
        places: result of the call, without values.
    """
    position, default = _CHOICES[func._overloadpacket]
    dim = args[position] if len(args) > position else kwargs.get("dim", default)
    if dim is None or args[0].dim() == 0 or not _is_small(places) or places.numel() == 0:
        return None
    num_choices = args[0].shape[dim]
    with unset_fake_temporarily():
        if places.dim() < args[0].dim() or func._overloadpacket not in (_aten.topk, _aten.sort):
            return torch.arange(places.numel()).remainder_(num_choices).view(places.shape)
        shape = places.movedim(dim, -1).shape
        made = torch.arange(places.numel()).remainder_(num_choices)
        return made.view(shape).movedim(-1, dim)


def _run_for_real(func: OpOverload, args: Any, kwargs: Any) -> Any:
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _shape_of(value: Tensor, device: torch.device) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=device)


def _address(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
