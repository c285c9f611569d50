"""Finds the samples in the arguments of a step. See docs/design/cutting.md."""

from __future__ import annotations

import enum
import sys
import weakref
from collections import UserDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

Path = tuple[str, ...]

_NAMED_VOTE = 1.5  # vote of a tensor in input_split_axes; other tensors have 1
_LENGTH_VOTE = 0.9  # vote of a list for its length, as its tensors may support another number
_SQUARE_DIMS = (2, 3)  # without images, which often have as many channels as samples
_SCALARS = (type(None), bool, int, float, str)


class Reading(enum.Enum):
    """The way in which an argument, or an entry of a container, is cut."""

    WHOLE = "whole"  # every microbatch gets all of it
    ALONG = "along"  # a tensor, cut along a dimension
    ENTRIES = "entries"  # a list with an entry for each sample
    INSIDE = "inside"  # a container, whose entries are read by themselves


@dataclass
class Rules:
    """The rules of a step function for its arguments, and its readings so far.

    Attributes:
        non_split: names of arguments and of entries ("batch.mask") that are not cut.
        axes: batch dimension by name.
        known: readings that were the only possible ones, in this call or an earlier one.
        seen: tensor of each argument in the last call, and its version.
        last: types and shapes of the last call's arguments, and their readings.
    """

    non_split: frozenset[str] = frozenset()
    axes: Mapping[str, int] = field(default_factory=dict)
    known: dict[Path, Reading] = field(default_factory=dict)
    seen: dict[Path, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)
    last: tuple[Hashable, Readings] | None = None

    def axis(self, path: Path) -> int | None:
        """Returns the dimension that the longest name gives for this path, or None."""
        if not self.axes:
            return None
        names = (".".join(path[:end]) for end in range(len(path), 0, -1))
        return next((self.axes[name] for name in names if name in self.axes), None)

    def is_whole(self, path: Path) -> bool:
        return ".".join(path) in self.non_split


@dataclass
class Readings:
    """The readings of all arguments of a call.

    Attributes:
        num_samples: number of samples of the batch; 0 if nothing is cut.
        by_path: reading of each argument, and of each entry of those that are read inside.
        is_cut: whether something is cut.
        along: path, keys and dimension of each tensor that is cut along a dimension.
        dims: dimensions of the samples in all tensors that are cut.
        shapes: shapes of tensors that are cut along a dimension that no name gives.
        others: shapes of tensors with another number of rows.
        several: description of another reading that fits as well.
        uncut: objects that may have an entry for each sample, and are not cut.
    """

    num_samples: int = 0
    by_path: dict[Path, Reading] = field(default_factory=dict)
    is_cut: bool = False
    along: list[tuple[Path, tuple[Any, ...], int]] = field(default_factory=list)
    dims: set[int] = field(default_factory=set)
    shapes: dict[Path, tuple[int, ...]] = field(default_factory=dict)
    others: dict[Path, tuple[int, ...]] = field(default_factory=dict)
    several: dict[Path, str] = field(default_factory=dict)
    uncut: list[Path] = field(default_factory=list)


def read(arguments: Mapping[str, Any], rules: Rules) -> Readings:
    """Reads the arguments of a call; arguments like those of the last call are read alike.

    Args:
        arguments: arguments of the step function by name.
        rules: rules of the step function, which learn from this call.

    Raises:
        ValueError: a tensor lacks the dimension that the step function names.
    """
    layout = _layout(arguments)
    if rules.last is not None and layout is not None and rules.last[0] == layout:
        return rules.last[1]
    readings = _Reader(arguments, rules).readings
    rules.last = None if layout is None else (layout, readings)
    return readings


class _Reader:
    """Reads the arguments of one call; see `read`."""

    def __init__(self, arguments: Mapping[str, Any], rules: Rules) -> None:
        self._arguments = arguments
        self._rules = rules
        self.readings = Readings()
        self.readings.num_samples = self._find_num_samples()
        for name, value in arguments.items():
            self._read(value, (name,), (name,))
        found = self.readings.by_path.values()
        self.readings.is_cut = bool(self.readings.dims) or Reading.ENTRIES in found

    # ---- how many samples there are

    def _find_num_samples(self) -> int:
        """Returns the number of samples that most arguments support.

        If several numbers have equal support, that of the first tensor counts, and then the
        largest.
        """
        rules = self._rules
        voters = [voter for n, v in self._arguments.items() for voter in self._voters(v, (n,))]
        candidates = {size for value, path in voters for size in self._sizes(value, path)}
        extents = [
            extent
            for v, p in voters
            if not is_array(v) and (extent := extent_of(v, p, rules)) is not None
        ]
        named = [extent_of(v, p, rules) or 0 for v, p in voters if rules.axis(p) is not None]
        fitting = [c for c in candidates if not any(n > 1 and n % c for n in named)]
        if not fitting:
            return max(extents, default=0)
        first = next((extent for extent in extents if extent > 1), 0)

        def support(size: int) -> tuple[float, bool, int]:
            votes = (self._support(value, path, size) or 0.0 for value, path in voters)
            return round(sum(votes), 6), size == first, size

        return max(fitting, key=support)

    def _voters(self, value: Any, path: Path) -> Iterator[tuple[Any, Path]]:
        """Yields arguments, and the entries of those that are certainly containers."""
        if self._rules.is_whole(path):
            return
        if is_mapping(value) or (
            isinstance(value, list | tuple) and self._is_container(value, path)
        ):
            for entry, below in entries(value, path):
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
        """Yields the numbers of samples that a value supports by one of its readings."""
        extent = None if is_array(value) else extent_of(value, path, self._rules)
        if extent is not None:
            if extent > 1 and self._rules.known.get(path) is not Reading.WHOLE:
                yield extent
        elif isinstance(value, list | tuple | set | frozenset) and _has_tensor(value):
            is_list = not isinstance(value, set | frozenset)
            known = self._rules.known.get(path) is Reading.ENTRIES or _are_records(value)
            if is_list and (known or len(value) > 1):
                yield len(value)
            if not (is_list and known):
                for entry, below in entries(value, path):
                    yield from self._sizes(entry, below)
        elif is_mapping(value):
            for entry, below in entries(value, path):
                yield from self._sizes(entry, below)

    def _support(self, value: Any, path: Path, size: int) -> float | None:
        """Returns the vote of a value for a number of samples; None if it has none."""
        rules = self._rules
        if rules.is_whole(path) or rules.known.get(path) is Reading.WHOLE or is_array(value):
            return None
        extent = extent_of(value, path, self._rules)
        if extent is not None:
            if extent == 1:
                return None
            vote = 1.0 if rules.axis(path) is None else _NAMED_VOTE
            return vote * (extent == size)
        is_list = isinstance(value, list | tuple)
        if not _has_tensor(value) or not (
            is_list or is_mapping(value) or isinstance(value, set | frozenset)
        ):
            return None
        votes = [self._support(entry, below, size) for entry, below in entries(value, path)]
        counting = [vote for vote in votes if vote is not None]
        inside = sum(counting) / len(counting) if counting else None
        if not is_list or self._is_container(value, path):
            return inside
        records = _are_records(value)
        own = (1.0 if records else _LENGTH_VOTE) * (len(value) == size)
        if rules.known.get(path) is Reading.ENTRIES:
            return own
        return max(own, (inside or 0.0) * (0.5 if records else 1.0))

    # ---- readings

    def _read(self, value: Any, path: Path, keys: tuple[Any, ...]) -> None:
        reading = self._reading(value, path)
        self.readings.by_path[path] = reading
        if reading is Reading.INSIDE:
            for key, (entry, below) in zip(_keys(value), entries(value, path), strict=True):
                self._read(entry, below, (*keys, key))
        elif reading is Reading.ALONG and isinstance(value, Tensor):
            self.readings.along.append((path, keys, self._rules.axis(path) or 0))

    def _reading(self, value: Any, path: Path) -> Reading:
        if self._rules.is_whole(path) or hasattr(value, "smp_slice"):
            return Reading.WHOLE
        if extent_of(value, path, self._rules) is not None:
            return self._reading_of_tensor(value, path)
        if is_mapping(value) or isinstance(value, set | frozenset):
            return Reading.INSIDE
        if isinstance(value, list | tuple):
            return self._reading_of_list(value, path)
        if not isinstance(value, Tensor | nn.Module) and self._keeps_samples(value):
            self.readings.uncut.append(path)
        return Reading.WHOLE

    def _reading_of_tensor(self, value: Any, path: Path) -> Reading:
        rules, size = self._rules, self.readings.num_samples
        extent, axis = extent_of(value, path, self._rules), rules.axis(path)
        if axis is None and extent != size:
            if extent != 1 and size > 1 and not is_array(value):
                if rules.known.get(path) is not Reading.WHOLE:
                    self.readings.others[path] = tuple(getattr(value, "shape", (extent or 0,)))
                rules.known[path] = Reading.WHOLE
            return Reading.WHOLE
        if extent == 1 < size or rules.known.get(path) is Reading.WHOLE:
            return Reading.WHOLE
        if isinstance(value, Tensor):
            self.readings.dims.add((axis or 0) % value.dim())
            if axis is None:
                self.readings.shapes[path] = tuple(value.shape)
                self._look_for_squares(value, path)
        elif isinstance(value, PackedSequence):
            self.readings.dims.add(0)
        return Reading.ALONG

    def _look_for_squares(self, value: Tensor, path: Path) -> None:
        if value.dim() not in _SQUARE_DIMS or self.readings.num_samples < 2:
            return
        if value.shape[1] != self.readings.num_samples:
            self._rules.known[path] = Reading.ALONG
        elif path not in self._rules.known:
            self.readings.several[path] = f"has {self.readings.num_samples} along dimension 1, too"

    def _reading_of_list(self, value: Sequence[Any], path: Path) -> Reading:
        rules, size = self._rules, self.readings.num_samples
        if self._is_container(value, path) or _has_slices(value):
            return Reading.INSIDE
        if not _has_tensor(value):
            return self._reading_of_others(value, path)
        fits = len(value) == size and rules.known.get(path) is not Reading.INSIDE
        votes = [self._support(entry, below, size) for entry, below in entries(value, path)]
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
        self.readings.several[path] = f"has {other}, too"
        return reading

    def _reading_of_others(self, value: Sequence[Any], path: Path) -> Reading:
        """Reads a list of texts, numbers or objects."""
        rules, size = self._rules, self.readings.num_samples
        if size < 2 or len(value) != size or rules.known.get(path) is Reading.WHOLE:
            if size > 1 and value:
                rules.known[path] = Reading.WHOLE
            return Reading.WHOLE
        if isinstance(value, tuple) and all(isinstance(v, int | float | None) for v in value):
            if rules.axis(path) is None:  # it may be a height and a width
                self.readings.uncut.append(path)
                return Reading.WHOLE
        return Reading.ENTRIES

    def _keeps_samples(self, value: Any) -> bool:
        """Returns whether an object has a tensor with a row per sample (any, if none is cut)."""
        size = self.readings.num_samples
        shape = getattr(value, "shape", None)
        if isinstance(shape, tuple):
            return len(shape) > 0 and shape[0] == size > 1
        kept = getattr(value, "__dict__", {}).values()
        tensors = [item for item in kept if isinstance(item, Tensor) and item.dim() > 0]
        return any(not size or tensor.shape[0] == size for tensor in tensors)


# ---- parts


def extent_of(value: Any, path: Path, rules: Rules) -> int | None:
    """Returns the entries of a tensor or array along its batch dimension."""
    axis = rules.axis(path)
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
    if is_array(value) and value.ndim > (axis or 0):
        return int(value.shape[axis or 0])
    return None


def _layout(arguments: Mapping[Any, Any]) -> tuple[Hashable, ...] | None:
    """Returns names, types and shapes of arguments; None if a reading depends on more."""
    layout: list[Hashable] = []
    for name, value in arguments.items():
        kind = type(value)
        if kind is Tensor and not hasattr(value, "smp_slice"):
            layout.append((name, value.shape))
        elif kind in _SCALARS:
            layout.append((name, kind))
        elif isinstance(value, dict | UserDict) or kind in (list, tuple):
            inside = _layout(value if hasattr(value, "items") else dict(enumerate(value)))
            if inside is None:
                return None
            layout.append((name, kind, inside))
        else:
            return None
    return tuple(layout)


def entries(value: Any, path: Path) -> Iterator[tuple[Any, Path]]:
    named = value.items() if is_mapping(value) else enumerate(value)
    for key, entry in named:
        yield entry, (*path, str(key))


def _keys(value: Any) -> Iterable[Any]:
    return value.keys() if is_mapping(value) else range(len(value))


def is_mapping(value: Any) -> bool:
    return isinstance(value, dict | UserDict)  # Hugging Face's BatchEncoding is one of the latter


def is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    if is_mapping(value):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, list | tuple | set | frozenset) and any(map(_has_tensor, value))


def _has_slices(value: Any) -> bool:
    """Returns whether there are objects that cut themselves."""
    if isinstance(value, list | tuple):
        return any(map(_has_slices, value))
    return hasattr(value, "smp_slice")


def _are_records(value: Sequence[Any] | set[Any] | frozenset[Any]) -> bool:
    return len(value) > 0 and all(map(is_mapping, value))


def _are_images(value: Sequence[Any]) -> bool:
    dims = {entry.dim() if isinstance(entry, Tensor) else 0 for entry in value}
    return len(dims) == 1 and min(dims) > 2
