"""Cutting the arguments of a step into microbatches, and joining what the microbatches return."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


def tensors_to_split(value: Any) -> Iterator[Tensor]:
    """The tensors in ``value`` that have a batch dimension, at any depth of containers."""
    if isinstance(value, Tensor):
        if value.dim() > 0:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_to_split(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_to_split(item)


def num_microbatches(
    arguments: Mapping[str, Any], axes: Mapping[str, int], microbatches: int
) -> int:
    """How many microbatches the arguments make: fewer when there are fewer samples.

    Args:
        arguments: by name, those that are cut.
        axes: batch dimension by name, 0 where absent.
        microbatches: of the configuration.

    Raises:
        ValueError: if a batch dimension does not exist.
    """
    sizes = batch_sizes(arguments, axes)
    return min([microbatches, *(max(size, 1) for _, size in sizes)])


def batch_sizes(arguments: Mapping[str, Any], axes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Name of the argument and size of the batch dimension of each tensor that is cut.

    Raises:
        ValueError: if a batch dimension does not exist, or samples lie between each other.
    """
    sizes = []
    for name, value in arguments.items():
        axis = axes.get(name, 0)
        if isinstance(value, PackedSequence):
            raise ValueError(
                f"argument '{name}' of the step function is a PackedSequence, which cannot be cut "
                "into samples; hand over padded sequences and their lengths, and pack inside of "
                "the step function"
            )
        for tensor in tensors_to_split(value):
            if not -tensor.dim() <= axis < tensor.dim():
                raise ValueError(
                    f"argument '{name}' of the step function has a tensor of shape "
                    f"{tuple(tensor.shape)} without dimension {axis}; set its batch dimension "
                    "with input_split_axes or name it in non_split_inputs"
                )
            sizes.append((name, tensor.shape[axis]))
    return sizes


def several_sizes(
    sizes: Sequence[tuple[str, int]], axes: Mapping[str, int]
) -> list[tuple[str, int]]:
    """Arguments that are cut though their extents differ; empty where all are alike.

    A table, a mask for all samples or a vector of weights is cut, too, and a model may go on with
    pieces of it that broadcast.

    Args:
        sizes: from `batch_sizes`.
        axes: batch dimension by name, of arguments of which the script says that they have one.
    """
    unnamed = [(name, size) for name, size in sizes if name not in axes]
    return list(dict.fromkeys(unnamed)) if len({size for _, size in unnamed}) > 1 else []


def uncut(arguments: Mapping[str, Any], num_samples: int) -> list[str]:
    """Arguments that every microbatch gets whole though they may have an entry for each sample.

    Lists without tensors and arrays of so many entries, and objects that keep a tensor of so many.

    Args:
        arguments: by name, those that are cut where they can be.
        num_samples: of the batch; 0 if nothing is cut, then any tensor in an object counts.
    """
    return [name for name, value in arguments.items() if _is_uncut(value, num_samples)]


def _is_uncut(value: Any, num_samples: int) -> bool:
    if isinstance(value, Tensor | nn.Module | str | bytes) or hasattr(value, "smp_slice"):
        return False
    if isinstance(value, dict | UserDict):
        return any(_is_uncut(item, num_samples) for item in value.values())
    if isinstance(value, list | tuple):
        if next(tensors_to_split(value), None) is None:
            return len(value) == num_samples > 1
        return any(_is_uncut(item, num_samples) for item in value)
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return len(shape) > 0 and shape[0] == num_samples > 1
    kept = (item for item in getattr(value, "__dict__", {}).values() if isinstance(item, Tensor))
    return any(t.dim() > 0 and (not num_samples or t.shape[0] == num_samples) for t in kept)


def num_samples(arguments: Mapping[str, Any], axes: Mapping[str, int]) -> int:
    """Of the largest tensor that is cut; 0 where dummies have no batch dimension."""
    try:
        return max((size for _, size in batch_sizes(arguments, axes)), default=0)
    except ValueError:
        return 0


def sample_dim(arguments: Mapping[str, Any], axes: Mapping[str, int]) -> int | None:
    """Along which dim the tensors that are cut have samples; None: along several."""
    found = {
        axes.get(name, 0) % tensor.dim()
        for name, value in arguments.items()
        for tensor in tensors_to_split(value)
    }
    return next(iter(found), 0) if len(found) < 2 else None


def weights(sizes: Sequence[tuple[str, int]], count: int, *, strict: bool) -> list[float] | None:
    """Weight of each microbatch in a mean over the whole batch, 1 on average.

    Args:
        sizes: from `batch_sizes`.
        count: number of microbatches.
        strict: refuse arguments that would give different weights.

    Returns:
        None when all microbatches are of one size.

    Raises:
        ValueError: when the microbatches of one argument are uneven and those of another have
            other sizes.
    """
    if all(size % count == 0 for _, size in sizes):
        return None
    if len({size for _, size in sizes}) > 1:
        if not strict:
            return None
        raise ValueError(
            f"the arguments of the step function have batch dimensions of several sizes "
            f"({dict(sizes)}), which {count} microbatches do not divide, so the weight of a "
            "microbatch is not defined; use batches of one size, sizes that microbatches divide, "
            "or name arguments in non_split_inputs"
        )
    size = sizes[0][1]
    # As torch.tensor_split cuts.
    pieces = [size // count + (mb < size % count) for mb in range(count)]
    return [piece * count / size for piece in pieces]


def split(value: Any, count: int, axis: int) -> list[Any]:
    """``count`` pieces of ``value``, tensors cut along ``axis``, containers rebuilt.

    Objects with ``smp_slice(num_mb, mb, axis)`` cut themselves; everything else is the same object
    in every piece.
    """
    if isinstance(value, Tensor):
        return list(torch.tensor_split(value, count, dim=axis)) if value.dim() else [value] * count
    if hasattr(value, "smp_slice"):
        return [value.smp_slice(count, mb, axis) for mb in range(count)]
    if isinstance(value, dict | UserDict):  # Hugging Face's BatchEncoding is one of the latter
        parts = {key: split(item, count, axis) for key, item in value.items()}
        return [
            _rebuild_dict(value, {key: pieces[mb] for key, pieces in parts.items()})
            for mb in range(count)
        ]
    if isinstance(value, list | tuple | set | frozenset):
        columns = [split(item, count, axis) for item in value]
        return [_rebuild_sequence(value, [c[mb] for c in columns]) for mb in range(count)]
    return [value] * count


class StepOutput:
    """What a step returns in place of a tensor: that tensor of every microbatch.

    Attributes:
        outputs: tensors in the order of the microbatches, on this rank's device.
    """

    def __init__(self, outputs: Sequence[Tensor], weights: Sequence[float] | None = None) -> None:
        self.outputs = list(outputs)
        self._weights = None if weights is None else list(weights)

    def reduce_mean(self) -> Tensor:
        """Mean over microbatches (not over elements); shape of one output.

        Microbatches count by their weights (`smp.step`), so that the mean of means is the mean over
        the batch; what one of weight 0 returned does not count, whatever it is.
        """
        if self._weights is None:
            return self.reduce_sum() / len(self.outputs)
        weighted = [
            out * weight if weight else torch.zeros_like(out)
            for out, weight in zip(self.outputs, self._weights, strict=True)
        ]
        return torch.stack(weighted).sum(dim=0) / len(self.outputs)

    def reduce_sum(self) -> Tensor:
        """Sum over microbatches; shape of one output."""
        return torch.stack(self.outputs).sum(dim=0)

    def concat(self) -> Tensor:
        """Outputs joined along dimension 0; outputs without dimensions are stacked."""
        if self.outputs[0].dim() == 0:
            return self.stack()
        return torch.cat(self.outputs, dim=0)

    def stack(self) -> Tensor:
        """Outputs along a new first dimension of size ``microbatches``."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """The same without autograd graphs."""
        return StepOutput([output.detach() for output in self.outputs], self._weights)

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(output.shape)) for output in self.outputs)
        return f"StepOutput({len(self.outputs)} microbatches: {shapes})"

    # A lone StepOutput in a ModelOutput must not be taken for a sequence of pairs.
    __iter__ = None  # type: ignore[assignment]


def join(results: Sequence[Any], detach: bool, weights: Sequence[float] | None = None) -> Any:
    """Joins the return values of all microbatches.

    A tensor becomes a :class:`StepOutput`, ``None`` everywhere stays ``None``, any other leaf
    becomes the list of its values; lists, tuples, dictionaries and their subclasses (Hugging
    Face's ``ModelOutput``) are rebuilt.

    Args:
        results: in the order of the microbatches.
        detach: whether tensors are detached.
        weights: of the microbatches in a mean, if they differ.

    Raises:
        ValueError: if the microbatches returned different structures.
    """
    first = results[0]
    if isinstance(first, Tensor):
        _require(results, lambda r: isinstance(r, Tensor), "a tensor")
        return StepOutput([r.detach() for r in results] if detach else results, weights)
    if first is None and all(r is None for r in results):
        return None
    if isinstance(first, dict):
        _require(
            results,
            lambda r: isinstance(r, dict) and r.keys() == first.keys(),
            f"a dictionary with keys {list(first)}",
        )
        return _rebuild_dict(
            first, {k: join([r[k] for r in results], detach, weights) for k in first}
        )
    if isinstance(first, list | tuple):
        _require(
            results,
            lambda r: isinstance(r, list | tuple) and len(r) == len(first),
            f"{len(first)} values",
        )
        return _rebuild_sequence(
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


def _rebuild_dict(like: Any, items: dict[Any, Any]) -> Any:
    if type(like) is dict:
        return items
    if isinstance(like, UserDict):
        rebuilt = copy.copy(like)
        rebuilt.data = items
        return rebuilt
    # Without __init__: ModelOutput's inspects its fields and would take values apart.
    cls: Any = type(like)
    rebuilt = cls.__new__(cls)
    for key, item in items.items():
        rebuilt[key] = item
    return rebuilt


def _rebuild_sequence(like: Any, items: list[Any]) -> Any:
    if hasattr(like, "_fields"):  # a named tuple
        return type(like)(*items)
    return type(like)(items)
