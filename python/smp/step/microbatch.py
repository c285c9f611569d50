"""Joins the results of the microbatches of a step."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class StepOutput:
    """The tensors that a step returns for all microbatches, instead of one tensor.

    Attributes:
        outputs: tensors in the order of the microbatches, on this rank's device.
    """

    def __init__(self, outputs: Sequence[Tensor], weights: Sequence[float] | None = None) -> None:
        self.outputs = list(outputs)
        self._weights = None if weights is None else list(weights)

    def reduce_mean(self) -> Tensor:
        """Returns the mean over microbatches (not over elements); shape of one output.

        Microbatches count by their weights (`smp.step`), so that the mean of means is the mean over
        the batch. The output of a microbatch of weight 0 does not count, even if it is NaN.
        """
        if self._weights is None:
            return self.reduce_sum() / len(self.outputs)
        weighted = [
            out * weight if weight else torch.zeros_like(out)
            for out, weight in zip(self.outputs, self._weights, strict=True)
        ]
        return torch.stack(weighted).sum(dim=0) / len(self.outputs)

    def reduce_sum(self) -> Tensor:
        """Returns the sum over microbatches; shape of one output."""
        return torch.stack(self.outputs).sum(dim=0)

    def concat(self) -> Tensor:
        """Joins outputs along dimension 0; outputs without dimensions are stacked."""
        if self.outputs[0].dim() == 0:
            return self.stack()
        return torch.cat(self.outputs, dim=0)

    def stack(self) -> Tensor:
        """Stacks outputs along a new first dimension of size ``microbatches``."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """Returns the same outputs without autograd graphs."""
        return StepOutput([output.detach() for output in self.outputs], self._weights)

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(output.shape)) for output in self.outputs)
        return f"StepOutput({len(self.outputs)} microbatches: {shapes})"

    # Otherwise a lone StepOutput in a ModelOutput would be read as a sequence of pairs.
    __iter__ = None  # type: ignore[assignment]


def join(results: Sequence[Any], detach: bool, weights: Sequence[float] | None = None) -> Any:
    """Joins the return values of all microbatches.

    A tensor becomes a :class:`StepOutput`, ``None`` everywhere stays ``None``, any other leaf
    becomes the list of its values; lists, tuples, dictionaries and their subclasses (Hugging
    Face's ``ModelOutput``) are rebuilt.

    Args:
        results: results in the order of the microbatches.
        detach: whether tensors are detached.
        weights: weights of the microbatches in a mean, if they differ.

    Raises:
        ValueError: if the microbatches returned different structures.
    """
    first = results[0]
    if isinstance(first, Tensor):
        outputs = []
        for result in results:
            if not isinstance(result, Tensor):
                _require(results, lambda r: isinstance(r, Tensor), "a tensor")
            outputs.append(result.detach() if detach else result)
        return StepOutput(outputs, weights)
    if first is None and all(r is None for r in results):
        return None
    if isinstance(first, dict):
        _require(
            results,
            lambda r: isinstance(r, dict) and r.keys() == first.keys(),
            f"a dictionary with keys {list(first)}",
        )
        return rebuild_dict(
            first, {k: join([r[k] for r in results], detach, weights) for k in first}
        )
    if isinstance(first, list | tuple):
        _require(
            results,
            lambda r: isinstance(r, list | tuple) and len(r) == len(first),
            f"{len(first)} values",
        )
        return rebuild_sequence(
            first, [join([r[i] for r in results], detach, weights) for i in range(len(first))]
        )
    return list(results)


def _require(results: Sequence[Any], fits: Callable[[Any], bool], words: str) -> None:
    for mb, result in enumerate(results):
        if not fits(result):
            raise ValueError(
                f"the step function returned {words} in microbatch 0 but {type(result).__name__} "
                f"in microbatch {mb}; return the same structure in every microbatch"
            )


def rebuild_dict(like: Any, items: dict[Any, Any]) -> Any:
    """Returns a mapping of the same class with other items."""
    if type(like) is dict:
        return items
    if isinstance(like, UserDict):
        rebuilt = copy.copy(like)
        rebuilt.data = items
        return rebuilt
    # Skip __init__: that of ModelOutput inspects its fields and would split values.
    cls: Any = type(like)
    rebuilt = cls.__new__(cls)
    for key, item in items.items():
        rebuilt[key] = item
    return rebuilt


def rebuild_sequence(like: Any, items: Iterable[Any]) -> Any:
    """Returns a list, tuple or set of the same class with other items."""
    if hasattr(like, "_fields"):  # a named tuple
        return type(like)(*items)
    return type(like)(items)
