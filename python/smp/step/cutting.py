"""Cuts the arguments of a step into microbatches. See docs/design/cutting.md."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        self._along = list(self._tensors(arguments, ()))
        self._fixed = self._take_fixed()

    def _take_fixed(self) -> list[Path]:
        """Returns tensors that are cut and have not changed since the last call, if others have."""
        seen, fixed, shapes = self._rules.seen, [], self._readings.shapes
        for path, tensor, _ in self._along:
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
        return min(microbatches, max(self.num_samples, 1)) if self._is_cut() else microbatches

    def _is_cut(self) -> bool:
        readings = self._readings
        return bool(readings.dims) or Reading.ENTRIES in readings.by_path.values()

    def samples_by_microbatch(self, count: int) -> list[float]:
        """Returns how many samples each microbatch has; 1 each if nothing is cut."""
        if not self._is_cut() or not self.num_samples:
            return [1.0] * count
        edges = _edges(self.num_samples, count)
        return [float(end - begin) for begin, end in zip(edges, edges[1:], strict=False)]

    def pieces(self, count: int) -> dict[str, list[Any]]:
        """Returns ``count`` pieces of each argument, by name; containers are rebuilt."""
        return {n: self._pieces(value, (n,), count) for n, value in self.arguments.items()}

    def part(self, count: int, number: int) -> Cutting:
        """Returns one of so many parts of the batch, as a batch that is read in the same way."""
        part = copy.copy(self)
        part.arguments = {name: pieces[number] for name, pieces in self.pieces(count).items()}
        part._along = list(part._tensors(part.arguments, ()))
        edges = _edges(self.num_samples, count)
        part.num_samples = edges[number + 1] - edges[number]
        return part

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        """Yields tensors that are cut along a dimension, with their names."""
        for path, tensor, axis in self._along:
            yield ".".join(path), tensor, axis

    def _tensors(self, value: Any, path: Path) -> Iterator[tuple[Path, Tensor, int]]:
        by_path = self._readings.by_path
        for entry, below in entries(value, path):
            if by_path[below] is Reading.INSIDE:
                yield from self._tensors(entry, below)
            elif by_path[below] is Reading.ALONG and isinstance(entry, Tensor):
                yield below, entry, self._rules.axis(below) or 0

    def _pieces(self, value: Any, path: Path, count: int) -> list[Any]:
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
            spans = self._spans(len(value), count, path)
            return [rebuild_sequence(value, value[begin:end]) for begin, end in spans]
        extent = extent_of(value, path, self._rules)
        assert extent is not None  # since it is cut along a dimension
        return _cut(value, self._spans(extent, count, path), self._rules.axis(path) or 0)

    def _spans(self, extent: int, count: int, path: Path) -> list[tuple[int, int]]:
        """Returns the rows of each microbatch, for a tensor with ``extent`` rows.

        Raises:
            ValueError: the rows of a sample would be in two microbatches.
        """
        size = self.num_samples
        edges = _edges(size, count)
        if extent != size:
            if any(edge * extent % max(size, 1) for edge in edges):
                raise ValueError(
                    f"argument '{'.'.join(path)}' of the step function has {extent} entries along "
                    f"its batch dimension, and the batch has {size} samples, so that {count} "
                    "microbatches cannot have whole samples of both; use a batch that microbatches "
                    "divide, or name the argument in non_split_inputs"
                )
            edges = [edge * extent // max(size, 1) for edge in edges]
        return list(zip(edges, edges[1:], strict=False))

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


def _edges(size: int, count: int) -> list[int]:
    """Returns the boundaries of microbatches; the first ones have one sample more."""
    base, more = divmod(size, count)
    return [mb * base + min(mb, more) for mb in range(count + 1)]


def _cut(value: Any, spans: Sequence[tuple[int, int]], axis: int) -> list[Any]:
    if isinstance(value, Tensor):
        return list(torch.tensor_split(value, [end for _, end in spans[:-1]], dim=axis))
    if not isinstance(value, PackedSequence):
        return [value[(slice(None),) * axis + (slice(*span),)] for span in spans]
    padded, lengths = pad_packed_sequence(value)
    is_sorted = value.sorted_indices is None
    return [
        pack_padded_sequence(padded[:, begin:end], lengths[begin:end], enforce_sorted=is_sorted)
        for begin, end in spans
    ]


def _listed(paths: Iterable[Path]) -> str:
    return ", ".join(".".join(path) for path in paths)
