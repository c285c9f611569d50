"""Cuts the arguments of a step into microbatches. See docs/design/cutting.md."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from smp.step.microbatch import rebuild_dict, rebuild_sequence
from smp.step.readings import Path, Reading, Rules, entries, extent_of, is_mapping, read


class Cutting:
    """The arguments of one call, and the way in which they are cut.

    Args:
        arguments: arguments of the step function by name.
        rules: rules of the step function; readings of this call are added to them.

    Attributes:
        num_samples: number of samples of the batch; 0 if nothing is cut.

    Raises:
        ValueError: a tensor lacks the dimension that the step function names.
    """

    def __init__(self, arguments: Mapping[str, Any], rules: Rules) -> None:
        self.arguments = arguments
        self._rules = rules
        self._readings = read(arguments, rules)
        self.num_samples = self._readings.num_samples
        self._fixed = self._take_fixed()

    def _take_fixed(self) -> list[Path]:
        """Returns tensors that are cut and have not changed since the last call, if others have."""
        seen, fixed, shapes = self._rules.seen, [], self._readings.shapes
        for path, tensor, _ in self.along() if shapes else ():
            if path not in shapes:
                continue
            version = 0 if tensor.is_inference() else tensor._version
            last = seen.get(path)
            if last is not None and last[0]() is tensor and last[1] == version:
                fixed.append(path)
            seen[path] = weakref.ref(tensor), version
        return fixed if len(fixed) < len(shapes) else []

    def sample_dim(self) -> int | None:
        """Returns the dimension along which cut tensors have samples; None: there are several."""
        dims = self._readings.dims
        return next(iter(dims), 0) if len(dims) < 2 else None

    # ---- pieces

    def count(self, microbatches: int) -> int:
        """Returns how many microbatches there are: fewer when there are fewer samples."""
        is_cut = self._readings.is_cut
        return min(microbatches, max(self.num_samples, 1)) if is_cut else microbatches

    def samples_by_microbatch(self, count: int) -> Sequence[float]:
        """Returns how many samples each microbatch has; 1 each if nothing is cut."""
        if not self._readings.is_cut or not self.num_samples:
            return [1.0] * count
        edges = _edges(self.num_samples, count, self.num_samples)
        return list(map(float, map(operator.sub, edges[1:], edges)))

    def pieces(self, count: int) -> dict[str, Sequence[Any]]:
        """Returns ``count`` pieces of each argument, by name; containers are rebuilt."""
        pieces = {}
        for name, value in self.arguments.items():
            pieces[name] = self._pieces(value, (name,), count)
        return pieces

    def part(self, count: int, number: int) -> Cutting:
        """Returns one of so many parts of the batch, as a batch that is read in the same way."""
        part = copy.copy(self)
        part.arguments = {name: pieces[number] for name, pieces in self.pieces(count).items()}
        edges = _edges(self.num_samples, count, self.num_samples)
        part.num_samples = edges[number + 1] - edges[number]
        return part

    def along(self) -> list[tuple[Path, Tensor, int]]:
        """Returns tensors that are cut along a dimension, with their paths and the dimension."""
        found = []
        for path, keys, axis in self._readings.along:
            value: Any = self.arguments
            for key in keys:
                value = list(value)[key] if isinstance(value, set | frozenset) else value[key]
            found.append((path, value, axis))
        return found

    def _pieces(self, value: Any, path: Path, count: int) -> Sequence[Any]:
        reading = self._readings.by_path[path]
        if reading is Reading.WHOLE:
            if hasattr(value, "smp_slice") and not self._rules.is_whole(path):
                axis = self._rules.axis(path) or 0
                return [value.smp_slice(count, mb, axis) for mb in range(count)]
            return [value] * count
        if reading is Reading.INSIDE:
            columns = [self._pieces(entry, b, count) for entry, b in entries(value, path)]
            rows = [[column[mb] for column in columns] for mb in range(count)]
            if is_mapping(value):
                return [rebuild_dict(value, dict(zip(value, r, strict=True))) for r in rows]
            return [rebuild_sequence(value, row) for row in rows]
        if reading is Reading.ENTRIES:
            edges = self._edges_of(len(value), count, path)
            return [rebuild_sequence(value, value[b:e]) for b, e in itertools.pairwise(edges)]
        axis = self._rules.axis(path) or 0
        if isinstance(value, Tensor):
            edges = self._edges_of(value.shape[axis], count, path)
            return torch.tensor_split(value, edges[1:-1], dim=axis)
        extent = extent_of(value, path, self._rules)
        assert extent is not None  # since it is cut along a dimension
        return _cut(value, self._edges_of(extent, count, path), axis)

    def _edges_of(self, extent: int, count: int, path: Path) -> Sequence[int]:
        """Returns the boundaries of the microbatches in a tensor with ``extent`` rows.

        Raises:
            ValueError: the rows of a sample would be in two microbatches.
        """
        size = self.num_samples
        edges = _edges(size, count, extent)
        if not edges:
            raise ValueError(
                f"argument '{'.'.join(path)}' of the step function has {extent} entries along "
                f"its batch dimension, and the batch has {size} samples, so that {count} "
                "microbatches cannot have whole samples of both; use a batch that microbatches "
                "divide, or name the argument in non_split_inputs"
            )
        return edges

    # ---- remarks

    def remarks(self, count: int) -> dict[str, str]:
        """Returns remarks for the script about the cutting, by kind."""
        remarks, readings = {}, self._readings
        if readings.others:
            cut = _listed(readings.shapes) or "nothing else"
            sizes = ", ".join(f"{'.'.join(p)} {shape}" for p, shape in readings.others.items())
            remarks["others"] = (
                f"cuts {self.num_samples} samples ({cut}) into {count} microbatches, and gives "
                f"each the whole of arguments of other sizes: {sizes}. Name them in "
                "non_split_inputs, or the dimension of their samples in input_split_axes"
                + self._time_major()
            )
        if readings.several:
            found = "; ".join(f"{'.'.join(path)} {text}" for path, text in readings.several.items())
            remarks["several"] = (
                f"cuts {self.num_samples} samples into {count} microbatches, and its arguments can "
                f"be read in several ways: {found}. Name the dimension of the samples in "
                "input_split_axes, what is not cut in non_split_inputs"
            )
        if self._fixed:
            remarks["fixed"] = (
                f"cuts {_listed(self._fixed)} into {count} microbatches, the same tensor with the "
                "same values as in the step before, while the batch is another one. If it has no "
                "samples (class weights, a table, a mask), name it in non_split_inputs, else in "
                "input_split_axes"
            )
        if readings.uncut:
            remarks["uncut"] = (
                f"gives each of its {count} microbatches the whole of {_listed(readings.uncut)}, "
                "which may have an entry for each sample. Use tensors, lists, or objects with "
                "smp_slice(num_mb, mb, axis); name the rest in non_split_inputs"
            )
        return remarks

    def _time_major(self) -> str:
        """Returns a hint about tensors whose dimension 1 is another argument's batch dimension."""
        shapes = self._readings.shapes | self._readings.others
        extents = {shape[0] for shape in shapes.values()}
        found = [p for p, shape in shapes.items() if len(shape) > 1 and shape[1] in extents]
        if not found:
            return ""
        axes = ", ".join(f'"{".".join(path)}": 1' for path in found)
        return f" (time-major batches, with samples along dimension 1: {{{axes}}})"


# ---- parts


@functools.lru_cache(maxsize=256)
def _edges(size: int, count: int, extent: int) -> tuple[int, ...]:
    """Returns the boundaries of microbatches; the first ones have one sample more.

    Args:
        size: number of samples.
        count: number of microbatches.
        extent: number of rows that are cut.

    Returns:
        ``count + 1`` rows; none if the rows of a sample would be in two microbatches.
    """
    base, more = divmod(size, count)
    edges = [mb * base + min(mb, more) for mb in range(count + 1)]
    if extent == size:
        return tuple(edges)
    is_whole = all(edge * extent % max(size, 1) == 0 for edge in edges)
    return tuple(edge * extent // max(size, 1) for edge in edges) if is_whole else ()


def _cut(value: Any, edges: Sequence[int], axis: int) -> list[Any]:
    if not isinstance(value, PackedSequence):
        spans = itertools.starmap(slice, itertools.pairwise(edges))
        return [value[(slice(None),) * axis + (span,)] for span in spans]
    padded, lengths = pad_packed_sequence(value)
    is_sorted = value.sorted_indices is None
    return [
        pack_padded_sequence(padded[:, begin:end], lengths[begin:end], enforce_sorted=is_sorted)
        for begin, end in itertools.pairwise(edges)
    ]


def _listed(paths: Iterable[Path]) -> str:
    return ", ".join(".".join(path) for path in paths)
