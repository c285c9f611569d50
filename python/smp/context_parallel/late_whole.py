"""A sequence of which this rank has a part, whole only where code reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from smp.context_parallel import regions
from smp.context_parallel.parts import Interval
from smp.modules.late import LateTensor

#: Functions that give parts of parts, or NotImplemented where they need whole tensors. They get the
#: function that was called, and its arguments; `token_functions` fills the table.
of_tokens: dict[Any, Callable[..., Any]] = {}


@dataclass(frozen=True)
class Place:
    """The place of the part of a rank in a whole tensor.

    Attributes:
        dim: dim along which it is a part.
        sizes: numbers of tokens of all ranks.
        extent: number of tokens of the whole, the last ones of all parts.
        num_samples: number of samples if the dim has the tokens of all of them, one sample after
            the other; else 0.
    """

    dim: int
    sizes: tuple[int, ...]
    extent: int
    num_samples: int = 0

    @staticmethod
    def along(dim: int, length: int, most: int | None = None) -> Place:
        """Returns the place of even parts of a sequence, of which the last tokens may be left.

        Args:
            dim: dim along which it is a part.
            length: number of tokens of the sequence.
            most: largest number of tokens that are left of a sequence, or of a part of it.
        """
        most = length if most is None else most
        return Place(
            dim, tuple(min(most, size) for size in regions.sizes_of(length)), min(most, length)
        )

    @property
    def size(self) -> int:
        """Returns the size of this rank's part along the dim."""
        return self.sizes[regions.group().group_rank] * (self.num_samples or 1)

    @property
    def has_all(self) -> bool:
        """Returns whether the parts have all tokens of the whole, and no others."""
        return sum(self.sizes) == self.extent

    def at(self, dim: int) -> Place:
        """Returns the same tokens along another dim."""
        return replace(self, dim=dim)

    def flat(self, num_samples: int) -> Place:
        """Returns the place where the dims of samples and tokens, the first two, become one."""
        return replace(self, dim=0, num_samples=num_samples)

    def gather(self, part: Tensor) -> Tensor:
        """Returns the whole of a part. Backward: the part of the sum over the ranks."""
        if self.num_samples:
            apart = part.unflatten(self.dim, (self.num_samples, -1))
            return regions.gather(apart, self.dim + 1, self.sizes).flatten(self.dim, self.dim + 1)
        every = regions.gather(part, self.dim, self.sizes)
        more = sum(self.sizes) - self.extent
        return every.narrow(self.dim, more, self.extent) if more else every

    def part_of(self, whole: Tensor, dim: int) -> Tensor:
        """Returns this rank's part of a tensor that all ranks have, along a dim like this one."""
        own = Interval.of_rank(self.sizes, regions.group().group_rank)
        if self.num_samples:
            apart = whole.unflatten(dim, (self.num_samples, -1))
            return own.of(apart, dim + 1).flatten(dim, dim + 1)
        return own.of(whole, dim)


class LateWhole(LateTensor):
    """The result of a block that computed this rank's part of the tokens.

    Functions that treat tokens alone give a part again (`token_functions`). Every other function
    that needs numbers gets all tokens, gathered once. The next block takes the part as it is, so
    between blocks nothing is exchanged.
    """

    origin = "what a block gives that computes a part of the tokens (context_parallel_degree)"
    #: this rank's part
    part: Tensor
    place: Place
    _node: Any = None
    _version_read: int = 0
    _viewed_from: tuple[LateWhole, Callable[[Tensor], Tensor]] | None = None

    @staticmethod
    def of(part: Tensor, place: Place) -> LateWhole:
        """Returns the whole of a part.

        Args:
            part: part of this rank.
            place: place of the part.
        """
        late: LateWhole = _Late.apply(part, place)
        late.part, late.place, late._node = part, place, _node_of(late)
        return late

    def viewed(self, part: Tensor, place: Place, function: Callable[[Tensor], Tensor]) -> LateWhole:
        """Returns the whole of a part that shares memory with this one in the model's code.

        Args:
            part, place: part of the result, and its place.
            function: makes the result of this tensor's numbers.
        """
        late = LateWhole.of(part, place)
        late._viewed_from = self, function
        return late

    def read(self) -> Tensor:
        is_first = self._numbers is None
        numbers = super().read()
        if is_first:
            self._version_read = numbers._version
        return numbers

    def _read(self) -> Tensor:
        if self._viewed_from is not None:
            base, function = self._viewed_from
            return function(base.read())
        if _node_of(self) is self._node:
            return self.place.gather(self.part)
        with torch._C.DisableTorchFunctionSubclass():
            numbers: Tensor = _Numbers.apply(self)
        return numbers

    def is_as_given(self) -> bool:
        """Returns whether the part is the tensor that code has.

        It may have changed the numbers in place or hooked on to their gradient, and a checkpoint
        gives the tensor another graph.
        """
        if _node_of(self) is not self._node or (
            self._viewed_from and not self._viewed_from[0].is_as_given()
        ):
            return False
        x = self._numbers
        if x is None:
            return True
        has_hooks = x._backward_hooks or x.retains_grad or (x.is_leaf and x.requires_grad)
        return x._version == self._version_read and not has_hooks

    @property
    def source(self) -> Tensor:
        return self.part

    def part_along(self, dim: int) -> Tensor | None:
        """Returns the part, or None if it is another one than a block takes along a dim."""
        is_even = self.place.has_all and not self.place.num_samples
        is_own = dim == self.place.dim and is_even and self.is_as_given()
        return self.part if is_own else None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, LateWhole)]
        if all(x.place.has_all and x.is_as_given() for x in given):
            known = of_tokens.get(func)
            result = NotImplemented
            if known is not None:
                result = known(func, *args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return super().__torch_function__(func, types, args, kwargs)


def _node_of(late: LateWhole) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return late.grad_fn


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, place: Place) -> Tensor:
        ctx.place, ctx.shape = place, part.shape
        shape = list(part.shape)
        shape[place.dim] = place.extent * (place.num_samples or 1)
        late: Tensor = Tensor._make_wrapper_subclass(
            LateWhole, shape, dtype=part.dtype, device=part.device
        )
        return late

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            part = torch.zeros(ctx.shape, dtype=grads[0].dtype, device=grads[0].device)
            part.requires_grad_()
            whole = ctx.place.gather(part)
        return torch.autograd.grad(whole, part, grads[0])[0], None


class _Numbers(torch.autograd.Function):
    """The numbers of a tensor, by the tensor's own graph."""

    @staticmethod
    def forward(ctx: Any, late: LateWhole) -> Tensor:
        return late.place.gather(late.part)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]
