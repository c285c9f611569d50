"""Finds the samples in the arguments of a step, and cuts these. See docs/design/cutting.md."""

from __future__ import annotations

import copy
import enum
import sys
import weakref
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from smp.step.microbatch import rebuild_dict, rebuild_sequence

Path = tuple[str, ...]

_NAMED_VOTE = 1.5  # of a tensor in input_split_axes; one vote is worth 1
_LENGTH_VOTE = 0.9  # of a list for its length, where its tensors may say something else
_SQUARE_DIMS = (2, 3)  # images have as many channels as samples too often


class Reading(enum.Enum):
    """How an argument, or an entry of a container, is cut."""

    WHOLE = "whole"  # every microbatch gets all of it
    ALONG = "along"  # a tensor, cut along a dimension
    ENTRIES = "entries"  # a list with an entry for each sample
    INSIDE = "inside"  # a container, whose entries are read by themselves


@dataclass
class Rules:
    """What a step function says of its arguments, and how it has read them so far.

    Attributes:
        non_split: names of arguments and of entries ("batch.mask") that are not cut.
        axes: batch dimension by name.
        known: readings that were the only ones, in this call or an earlier one.
        seen: the tensor that an argument was in the last call, and its version.
    """

    non_split: frozenset[str] = frozenset()
    axes: Mapping[str, int] = field(default_factory=dict)
    known: dict[Path, Reading] = field(default_factory=dict)
    seen: dict[Path, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)

    def axis(self, path: Path) -> int | None:
        """Returns the dimension that the longest name gives for this path, or None."""
        names = (".".join(path[:end]) for end in range(len(path), 0, -1))
        return next((self.axes[name] for name in names if name in self.axes), None)

    def is_whole(self, path: Path) -> bool:
        return ".".join(path) in self.non_split


class Cutting:
    """The readings of the arguments of one call.

    Args:
        arguments: by name.
        rules: of the step function; what this call teaches is added.

    Attributes:
        num_samples: of the batch; 0 where nothing is cut.
        dims: along which samples lie, of all tensors that are cut.

    Raises:
        ValueError: a tensor lacks the dimension that the step function names.
    """

    def __init__(self, arguments: Mapping[str, Any], rules: Rules) -> None:
        self.dims: set[int] = set()
        self._arguments = arguments
        self._rules = rules
        self._readings: dict[Path, Reading] = {}
        self._cut: dict[Path, Tensor] = {}
        self._others: dict[Path, tuple[int, ...]] = {}  # shapes of tensors with other extents
        self._several: dict[Path, str] = {}  # readings that fit as well
        self._uncut: list[Path] = []
        self.num_samples = self._find_num_samples()
        for name, value in arguments.items():
            self._read(value, (name,))
        self._fixed = self._take_fixed()

    # ---- how many samples there are

    def _find_num_samples(self) -> int:
        """Returns the number of samples that most arguments support.

        Of numbers with equal support the first tensor's counts, and then the larger one.
        """
        rules = self._rules
        voters = [voter for n, v in self._arguments.items() for voter in self._voters(v, (n,))]
        candidates = {size for value, path in voters for size in self._sizes(value, path)}
        extents = [
            extent
            for v, p in voters
            if not _is_array(v) and (extent := self._extent(v, p)) is not None
        ]
        named = [self._extent(v, p) or 0 for v, p in voters if rules.axis(p) is not None]
        fitting = [c for c in candidates if not any(n > 1 and n % c for n in named)]
        if not fitting:
            return max(extents, default=0)
        first = next((extent for extent in extents if extent > 1), 0)

        def support(size: int) -> tuple[float, bool, int]:
            votes = (self._support(value, path, size) or 0.0 for value, path in voters)
            return round(sum(votes), 6), size == first, size

        return max(fitting, key=support)

    def _voters(self, value: Any, path: Path) -> Iterator[tuple[Any, Path]]:
        """Arguments, and the entries of those that are containers beyond doubt."""
        if self._rules.is_whole(path):
            return
        if _is_mapping(value) or (
            isinstance(value, list | tuple) and self._is_container(value, path)
        ):
            for entry, below in _entries(value, path):
                yield from self._voters(entry, below)
        else:
            yield value, path

    def _is_container(self, value: Sequence[Any], path: Path) -> bool:
        if isinstance(value, PackedSequence):
            return False
        is_named = self._rules.axis(path) is not None and _has_tensor(value)
        known = self._rules.known.get(path) is Reading.INSIDE
        return known or is_named or hasattr(value, "_fields")

    def _sizes(self, value: Any, path: Path) -> Iterator[int]:
        """Numbers of samples that a value supports by one of its readings."""
        extent = None if _is_array(value) else self._extent(value, path)
        if extent is not None:
            if extent > 1 and self._rules.known.get(path) is not Reading.WHOLE:
                yield extent
        elif isinstance(value, list | tuple | set | frozenset) and _has_tensor(value):
            is_list = not isinstance(value, set | frozenset)
            known = self._rules.known.get(path) is Reading.ENTRIES or _are_records(value)
            if is_list and (known or len(value) > 1):
                yield len(value)
            if not (is_list and known):
                for entry, below in _entries(value, path):
                    yield from self._sizes(entry, below)
        elif _is_mapping(value):
            for entry, below in _entries(value, path):
                yield from self._sizes(entry, below)

    def _support(self, value: Any, path: Path, size: int) -> float | None:
        """Returns the vote of a value for a number of samples; None if it has none."""
        rules = self._rules
        if rules.is_whole(path) or rules.known.get(path) is Reading.WHOLE or _is_array(value):
            return None
        extent = self._extent(value, path)
        if extent is not None:
            if extent == 1:
                return None
            vote = 1.0 if rules.axis(path) is None else _NAMED_VOTE
            return vote * (extent == size)
        is_list = isinstance(value, list | tuple)
        if not _has_tensor(value) or not (
            is_list or _is_mapping(value) or isinstance(value, set | frozenset)
        ):
            return None
        votes = [self._support(entry, below, size) for entry, below in _entries(value, path)]
        counting = [vote for vote in votes if vote is not None]
        inside = sum(counting) / len(counting) if counting else None
        if not is_list or self._is_container(value, path):
            return inside
        records = _are_records(value)
        own = (1.0 if records else _LENGTH_VOTE) * (len(value) == size)
        if rules.known.get(path) is Reading.ENTRIES:
            return own
        return max(own, (inside or 0.0) * (0.5 if records else 1.0))

    def _extent(self, value: Any, path: Path) -> int | None:
        """Returns the entries of a tensor or array along its batch dimension."""
        axis = self._rules.axis(path)
        if isinstance(value, PackedSequence):
            return int(value.batch_sizes[0])
        if isinstance(value, nn.Parameter) and axis is None:
            return None
        if isinstance(value, Tensor):
            if value.dim() == 0:
                return None
            if not -value.dim() <= (axis or 0) < value.dim():
                raise ValueError(
                    f"argument '{'.'.join(path)}' of the step function has a tensor of shape "
                    f"{tuple(value.shape)} without dimension {axis}; set its batch dimension "
                    "with input_split_axes or name it in non_split_inputs"
                )
            return int(value.shape[axis or 0])
        if _is_array(value) and value.ndim > (axis or 0):
            return int(value.shape[axis or 0])
        return None

    # ---- readings

    def _read(self, value: Any, path: Path) -> None:
        reading = self._reading(value, path)
        self._readings[path] = reading
        if reading is Reading.INSIDE:
            for entry, below in _entries(value, path):
                self._read(entry, below)

    def _reading(self, value: Any, path: Path) -> Reading:
        if self._rules.is_whole(path) or hasattr(value, "smp_slice"):
            return Reading.WHOLE
        if self._extent(value, path) is not None:
            return self._reading_of_tensor(value, path)
        if _is_mapping(value) or isinstance(value, set | frozenset):
            return Reading.INSIDE
        if isinstance(value, list | tuple):
            return self._reading_of_list(value, path)
        if not isinstance(value, Tensor | nn.Module) and self._keeps_samples(value):
            self._uncut.append(path)
        return Reading.WHOLE

    def _reading_of_tensor(self, value: Any, path: Path) -> Reading:
        rules, size = self._rules, self.num_samples
        extent, axis = self._extent(value, path), rules.axis(path)
        if axis is None and extent != size:
            if extent != 1 and size > 1 and not _is_array(value):
                if rules.known.get(path) is not Reading.WHOLE:
                    self._others[path] = tuple(getattr(value, "shape", (extent or 0,)))
                rules.known[path] = Reading.WHOLE
            return Reading.WHOLE
        if extent == 1 < size or rules.known.get(path) is Reading.WHOLE:
            return Reading.WHOLE
        if isinstance(value, Tensor):
            self.dims.add((axis or 0) % value.dim())
            if axis is None:
                self._cut[path] = value
                self._look_for_squares(value, path)
        elif isinstance(value, PackedSequence):
            self.dims.add(0)
        return Reading.ALONG

    def _look_for_squares(self, value: Tensor, path: Path) -> None:
        if value.dim() not in _SQUARE_DIMS or self.num_samples < 2:
            return
        if value.shape[1] != self.num_samples:
            self._rules.known[path] = Reading.ALONG
        elif path not in self._rules.known:
            self._several[path] = f"has {self.num_samples} along dimension 1, too"

    def _reading_of_list(self, value: Sequence[Any], path: Path) -> Reading:
        rules, size = self._rules, self.num_samples
        if self._is_container(value, path) or _has_slices(value):
            return Reading.INSIDE
        if not _has_tensor(value):
            return self._reading_of_others(value, path)
        fits = len(value) == size and rules.known.get(path) is not Reading.INSIDE
        votes = [self._support(entry, below, size) for entry, below in _entries(value, path)]
        counting = [vote for vote in votes if vote is not None]
        inside = sum(counting) > 0.5 * len(counting)
        if rules.known.get(path) is Reading.ENTRIES and fits:
            return Reading.ENTRIES
        if not (fits and inside):
            reading = Reading.ENTRIES if fits else Reading.INSIDE
            if size > 1 and (fits or inside):
                rules.known[path] = reading
            return reading
        reading = Reading.ENTRIES if _are_records(value) or _are_images(value) else Reading.INSIDE
        other = "tensors of as many rows" if reading is Reading.ENTRIES else f"{size} entries"
        self._several[path] = f"has {other}, too"
        return reading

    def _reading_of_others(self, value: Sequence[Any], path: Path) -> Reading:
        """Reads a list of texts, numbers or objects."""
        rules, size = self._rules, self.num_samples
        if size < 2 or len(value) != size or rules.known.get(path) is Reading.WHOLE:
            if size > 1 and value:
                rules.known[path] = Reading.WHOLE
            return Reading.WHOLE
        if isinstance(value, tuple) and all(isinstance(v, int | float | None) for v in value):
            if rules.axis(path) is None:  # a height and a width are no samples
                self._uncut.append(path)
                return Reading.WHOLE
        return Reading.ENTRIES

    def _keeps_samples(self, value: Any) -> bool:
        """Does an object keep a tensor with a row for each sample, or any if nothing is cut?"""
        size = self.num_samples
        shape = getattr(value, "shape", None)
        if isinstance(shape, tuple):
            return len(shape) > 0 and shape[0] == size > 1
        kept = getattr(value, "__dict__", {}).values()
        tensors = [item for item in kept if isinstance(item, Tensor) and item.dim() > 0]
        return any(not size or tensor.shape[0] == size for tensor in tensors)

    def _take_fixed(self) -> list[Path]:
        """Returns tensors that are cut and have not changed since the last call, if others have."""
        seen, fixed = self._rules.seen, []
        for path, tensor in self._cut.items():
            version = 0 if tensor.is_inference() else tensor._version
            last = seen.get(path)
            if last is not None and last[0]() is tensor and last[1] == version:
                fixed.append(path)
            seen[path] = weakref.ref(tensor), version
        return fixed if len(fixed) < len(self._cut) else []

    def sample_dim(self) -> int | None:
        """Returns along which dimension tensors that are cut have samples; None: several."""
        return next(iter(self.dims), 0) if len(self.dims) < 2 else None

    # ---- pieces

    def count(self, microbatches: int) -> int:
        """Returns how many microbatches there are: fewer when there are fewer samples."""
        return min(microbatches, max(self.num_samples, 1)) if self._is_cut() else microbatches

    def _is_cut(self) -> bool:
        return bool(self.dims) or Reading.ENTRIES in self._readings.values()

    def samples_by_microbatch(self, count: int) -> list[float]:
        """Returns how many samples each microbatch has; 1 each where nothing is cut."""
        if not self._is_cut() or not self.num_samples:
            return [1.0] * count
        edges = _edges(self.num_samples, count)
        return [float(end - begin) for begin, end in zip(edges, edges[1:], strict=False)]

    def pieces(self, count: int) -> dict[str, list[Any]]:
        """Returns ``count`` pieces of each argument, by name; containers are rebuilt."""
        return {n: self._pieces(value, (n,), count) for n, value in self._arguments.items()}

    def part(self, count: int, number: int) -> Cutting:
        """Returns one of so many parts of the batch, as a batch that is read in the same way."""
        part = copy.copy(self)
        part._arguments = {name: pieces[number] for name, pieces in self.pieces(count).items()}
        edges = _edges(self.num_samples, count)
        part.num_samples = edges[number + 1] - edges[number]
        return part

    @property
    def arguments(self) -> Mapping[str, Any]:
        return self._arguments

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        """Yields tensors that are cut along a dimension, with their names."""
        for name, value in self._arguments.items():
            yield from self._tensors(value, (name,))

    def _tensors(self, value: Any, path: Path) -> Iterator[tuple[str, Tensor, int]]:
        reading = self._readings[path]
        if reading is Reading.INSIDE:
            for entry, below in _entries(value, path):
                yield from self._tensors(entry, below)
        elif reading is Reading.ALONG and isinstance(value, Tensor):
            yield ".".join(path), value, self._rules.axis(path) or 0

    def _pieces(self, value: Any, path: Path, count: int) -> list[Any]:
        reading = self._readings[path]
        if reading is Reading.WHOLE:
            if hasattr(value, "smp_slice") and not self._rules.is_whole(path):
                axis = self._rules.axis(path) or 0
                return [value.smp_slice(count, mb, axis) for mb in range(count)]
            return [value] * count
        if reading is Reading.INSIDE:
            columns = [self._pieces(entry, b, count) for entry, b in _entries(value, path)]
            rows = [[column[mb] for column in columns] for mb in range(count)]
            if _is_mapping(value):
                return [rebuild_dict(value, dict(zip(value, r, strict=True))) for r in rows]
            return [rebuild_sequence(value, row) for row in rows]
        if reading is Reading.ENTRIES:
            spans = self._spans(len(value), count, path)
            return [rebuild_sequence(value, value[begin:end]) for begin, end in spans]
        extent = self._extent(value, path)
        assert extent is not None  # else it is not cut along a dimension
        return _cut(value, self._spans(extent, count, path), self._rules.axis(path) or 0)

    def _spans(self, extent: int, count: int, path: Path) -> list[tuple[int, int]]:
        """Returns the rows of each microbatch, of a tensor with so many.

        Raises:
            ValueError: the rows of a sample lie in two microbatches.
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
        """Returns what a script should read of the cutting, by kind."""
        remarks = {}
        cut = _listed(self._cut) or "nothing else"
        if self._others:
            sizes = ", ".join(f"{'.'.join(p)} {shape}" for p, shape in self._others.items())
            remarks["others"] = (
                f"cuts {self.num_samples} samples ({cut}) into {count} microbatches, and gives "
                f"each the whole of arguments of other sizes: {sizes}. Name them in "
                "non_split_inputs, or the dimension of their samples in input_split_axes"
                + self._time_major()
            )
        if self._several:
            found = "; ".join(f"{'.'.join(path)} {text}" for path, text in self._several.items())
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
        if self._uncut:
            remarks["uncut"] = (
                f"gives each of its {count} microbatches the whole of {_listed(self._uncut)}, "
                "which may have an entry for each sample. Use tensors, lists, or objects with "
                "smp_slice(num_mb, mb, axis); name the rest in non_split_inputs"
            )
        return remarks

    def _time_major(self) -> str:
        """Returns words about tensors whose dimension 1 is another argument's batch dimension."""
        shapes = {path: tuple(t.shape) for path, t in self._cut.items()} | self._others
        extents = {shape[0] for shape in shapes.values()}
        found = [p for p, shape in shapes.items() if len(shape) > 1 and shape[1] in extents]
        if not found:
            return ""
        axes = ", ".join(f'"{".".join(path)}": 1' for path in found)
        return f" (time-major batches, with samples along dimension 1: {{{axes}}})"


# ---- parts


def _entries(value: Any, path: Path) -> Iterator[tuple[Any, Path]]:
    named = value.items() if _is_mapping(value) else enumerate(value)
    for key, entry in named:
        yield entry, (*path, str(key))


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict | UserDict)  # Hugging Face's BatchEncoding is one of the latter


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    if _is_mapping(value):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, list | tuple | set | frozenset) and any(map(_has_tensor, value))


def _has_slices(value: Any) -> bool:
    """Are there objects that cut themselves?"""
    if isinstance(value, list | tuple):
        return any(map(_has_slices, value))
    return hasattr(value, "smp_slice")


def _are_records(value: Sequence[Any] | set[Any] | frozenset[Any]) -> bool:
    return len(value) > 0 and all(map(_is_mapping, value))


def _are_images(value: Sequence[Any]) -> bool:
    dims = {entry.dim() if isinstance(entry, Tensor) else 0 for entry in value}
    return len(dims) == 1 and min(dims) > 2


def _edges(size: int, count: int) -> list[int]:
    """Returns where microbatches begin and end; the first ones have one sample more."""
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
