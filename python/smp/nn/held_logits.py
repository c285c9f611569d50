"""Logits that are not computed where a loss takes their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

import smp._C as _C


def unreadable() -> RuntimeError:
    """Returns the error for logits that are read, and were never computed."""
    return RuntimeError(
        f"{_C.rank_prefix()}the logits of a loss are read, and fused_linear_cross_entropy computes "
        "this loss without them; call the model without labels to get logits, or set "
        "fused_linear_cross_entropy to False in the configuration"
    )


class Head(Protocol):
    """A head that computes logits, or a loss without them."""

    def logits_of(self, hidden: Tensor) -> Any: ...

    def loss_of(
        self, hidden: Tensor, targets: Tensor, ignore_index: int, divisor: Any
    ) -> Tensor: ...


class HeldLogits:
    """A substitute for logits that the code of a model passes from its head to its loss.

    It is no tensor. Logits are computed when they are read. If a loss is computed from them, they
    are never computed, and reading them raises RuntimeError.

    Args:
        head: head of the model.
        hidden: input of the head.
    """

    def __init__(self, head: Head, hidden: Tensor) -> None:
        self._head: Head | None = head
        self._hidden: Tensor | None = hidden
        self._needs_grad = torch.is_grad_enabled()
        self._made: Any = None

    @property
    def is_spent(self) -> bool:
        """Returns whether a loss took the place of the logits."""
        return self._head is None

    @property
    def logits(self) -> Any:
        """The logits, computed once; results return them to callers."""
        if self._made is None:
            if self._head is None or self._hidden is None:
                raise unreadable()
            # The first reader may be without gradients (a metric), and others are not.
            with torch.set_grad_enabled(self._needs_grad):
                self._made = self._head.logits_of(self._hidden)
        return self._made

    def loss(self, targets: Tensor, ignore_index: int, divisor: Any) -> Tensor:
        """Returns the mean of the targets' losses, or their sum divided by a number.

        Args:
            targets: ``[N, S]``.
            ignore_index: target of tokens that do not count.
            divisor: number or tensor of one element; None for the mean.

        Raises:
            RuntimeError: the logits were read before.
        """
        if self._made is not None:
            raise RuntimeError(
                f"{_C.rank_prefix()}the code of the model computes with logits before its loss "
                "(a scale or a cap, for example), which fused_linear_cross_entropy cannot compute "
                "without them; set it to False in the configuration"
            )
        if self._head is None or self._hidden is None:
            raise unreadable()
        loss = self._head.loss_of(self._hidden, targets, ignore_index, divisor)
        self._head = self._hidden = None
        return loss

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_head", "_hidden", "_made"):
            raise AttributeError(name)
        return getattr(self.logits, name)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*_read(tuple(args)), **_read(dict(kwargs or {})))

    def __repr__(self) -> str:
        return "HeldLogits(not computed)" if self._made is None else repr(self._made)

    def __hash__(self) -> int:
        return id(self)


def _read(value: Any) -> Any:
    """Returns a value with logits instead of their substitutes in it."""
    if isinstance(value, HeldLogits):
        return value.logits
    if type(value) in (tuple, list):
        return type(value)(_read(item) for item in value)
    if type(value) is dict:
        return {key: _read(item) for key, item in value.items()}
    return value


def _operator(name: str) -> Callable[..., Any]:
    def run(self: HeldLogits, *args: Any) -> Any:
        return getattr(self.logits, name)(*_read(args))

    run.__name__ = name
    return run


_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod"),
    *("pow", "rpow", "matmul", "rmatmul", "neg", "abs", "invert", "and", "or", "xor"),
    *("lt", "le", "gt", "ge", "eq", "ne", "iadd", "isub", "imul", "itruediv"),
    *("getitem", "setitem", "len", "iter", "contains", "bool", "float", "int", "array"),
)
for _name in _OPERATORS:
    setattr(HeldLogits, f"__{_name}__", _operator(f"__{_name}__"))
