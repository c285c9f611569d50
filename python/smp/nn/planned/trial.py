"""A trial whether a block computes the same from a part of the features as from all of them.

A plan for columns and their rows is only right if the code in between treats features, or heads,
one by one, and in the order in which they were cut. It is wrong, for example, if queries, keys and
values follow each other in one matrix that is split as one, or if a norm covers all features;
training would go on with other numbers. So before its first run a block of a user's plan runs twice
more. Columns return random numbers, first all features and then the part of this rank, and the
inputs of rows are compared.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.modules.flat import tensors_in
from smp.nn.experts import HoldsExperts
from smp.nn.planned.experts import PlannedTerm
from smp.nn.planned.linear import PlannedColumn, PlannedHeads, PlannedPart, PlannedRow, has_hooks
from smp.nn.planned.runs import CannotTry, Record, random_features
from smp.nn.run_aside import device_of, has_no_data, run_aside
from smp.tensor_parallel import regions, sharding
from smp.world.log import first_rank_log

_log = logging.getLogger("smp")
_TOLERANCE = 1e-2  # of norms


@dataclass
class Trial:
    """A trial of a block, made once.

    Attributes:
        wholes: attributes with this rank's numbers of heads, by path of a module in the block, and
            their values for all ranks.
        hints: sentences on what may be meant instead.
    """

    wholes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hints: Sequence[str] = ()

    def run(
        self,
        block: nn.Module,
        name: str,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Tries a block. Collective over the tensor-parallel group.

        Args:
            block: block whose parts are split.
            name: name of the block in the model.
            inner: forward of the block's own class.
            args, kwargs: arguments of its first call, with the samples of all ranks; unchanged.

        Raises:
            ValueError: on all ranks, if a row of any rank gets something else than its part of the
                whole.
        """
        problem: str | None = None
        try:
            problem = self._problem(block, inner, args, kwargs)
        except CannotTry as reason:
            say = first_rank_log.warning if self.hints else _log.debug
            say(
                "smp: whether the given plan fits '%s' could not be tried: %s; compare a few steps "
                "with one process. %s",
                name,
                reason,
                " ".join(self.hints),
            )
        if regions.all_say(problem is None, f"the plan fits '{name}'"):
            return
        hints = "".join(f"{hint} " for hint in self.hints)
        raise ValueError(
            f"{_C.rank_prefix()}the given plan does not fit '{name}': "
            f"{problem or 'this rank would be right, and another one is not'}. Code between "
            "columns and their row has to treat features, or heads, one by one, in the order of "
            f"the columns. {hints}SMP_CHECK_FIRST_STEP=0 leaves this trial out; name all parts "
            "that treat heads in the plan (a table of biases by head is 'rowwise'), or leave these "
            "parts out of it"
        )

    def _problem(
        self,
        block: nn.Module,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> str | None:
        """Returns the difference of the two runs as the end of a sentence, or None."""
        parts = _parts_of(block)
        whole = self._run(block, parts, True, inner, args, kwargs)
        whole.check()
        own = self._run(block, parts, False, inner, args, kwargs)
        sizes = {path: part._smp_sizes for path, part in parts.items()}
        return whole.problem_of(own, sizes, regions.rank(), _TOLERANCE)

    def _run(
        self,
        block: nn.Module,
        parts: Mapping[str, PlannedPart],
        whole: bool,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Record:
        """Runs the block and undoes its side effects."""
        direct = {id(value) for value in (*args, *kwargs.values())}
        nested = [x for x in tensors_in([*args, *kwargs.values()]) if id(x) not in direct]
        copies = [tensor.detach().clone() for tensor in nested]
        runs = _Runs(block, parts, whole, self.wholes if whole else {}, inner)
        written = run_aside(block, runs, args, kwargs)
        for tensor, copy in zip(nested, copies, strict=True):
            if any(tensor is x for x in written):
                tensor.data.copy_(copy)
        return runs.record


@dataclass
class _Runs:
    """Runs a block in eval mode and without a graph.

    Attributes:
        record: record of the run.
    """

    block: nn.Module
    parts: Mapping[str, PlannedPart]
    whole: bool
    attributes: Mapping[str, Mapping[str, Any]]
    inner: Callable[..., Any]
    record: Record = field(default_factory=Record)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        device = device_of(tensors_in([*args, *kwargs.values()]))
        with self._set():
            self.record.run(functools.partial(self.inner, *args, **kwargs), device)

    @contextlib.contextmanager
    def _set(self) -> Iterator[None]:
        """Replaces forwards of parts, and attributes with numbers of heads, within the context."""
        changes: list[tuple[nn.Module, str, Any]] = []
        changes += [(module, "training", False) for module in self.block.modules()]
        for idx, (path, part) in enumerate(self.parts.items()):
            place = _Column(self, path, idx) if _is_column(part) else _Row(self, path, idx)
            changes.append((part, "forward", place))
        for path, values in self.attributes.items():
            module = self.block.get_submodule(path)
            changes += [(module, key, value) for key, value in values.items()]
        before = [(module, key, module.__dict__.get(key, _NOTHING)) for module, key, _ in changes]
        try:
            for module, key, value in changes:
                module.__dict__[key] = value
            yield
        finally:
            for module, key, value in before:
                if value is _NOTHING:
                    module.__dict__.pop(key, None)
                else:
                    module.__dict__[key] = value


_NOTHING = object()


@dataclass
class _InPlace:
    """A replacement of a part's forward that returns random numbers, the same in each run."""

    runs: _Runs
    path: str
    seed: int
    num_calls: int = 0

    @property
    def part(self) -> PlannedPart:
        return self.runs.parts[self.path]

    def random(self, input: Tensor, width: int) -> Tensor:
        self.num_calls += 1
        return random_features((*input.shape[:-1], width), 1000 * self.seed + self.num_calls)

    def as_given(self, features: Tensor, input: Tensor) -> Tensor:
        """Returns features on the input's device, with the dtype of the part's output."""
        kind, dtype = input.device.type, self.part._matrix().dtype
        is_cast = torch.is_autocast_enabled(kind)
        return features.to(input.device, torch.get_autocast_dtype(kind) if is_cast else dtype)


class _Row(_InPlace):
    def __call__(self, input: Tensor) -> Tensor:
        self.runs.record.given.append((self.path, input.detach().clone()))
        return self.as_given(self.random(input, self.part._matrix().shape[0]), input)


class _Column(_InPlace):
    def __call__(self, input: Tensor) -> Tensor:
        sizes = self.part._smp_sizes
        num = self.part._smp_splits["weight"].num_packed if sizes else 1
        features = self.random(input, num * sum(sizes) or self.part._matrix().shape[0])
        return self.as_given(features if self.runs.whole else self._own(features, num), input)

    def _own(self, features: Tensor, num: int) -> Tensor:
        part = self.part
        if isinstance(part, PlannedHeads):
            heads = features.unflatten(-1, (-1, part._smp_unit))
            own: Tensor = heads[..., list(part._smp_heads), :]
            return own.flatten(-2)
        begin, size = sharding.begin_of(part._smp_sizes), part._smp_sizes[regions.rank()]
        apart: Tensor = features.unflatten(-1, (num, -1)).narrow(-1, begin, size)
        return apart.flatten(-2)


def _is_column(part: nn.Module) -> bool:
    return isinstance(part, PlannedColumn | PlannedHeads)


def _parts_of(block: nn.Module) -> dict[str, PlannedPart]:
    """Returns the columns and rows of a block, by path.

    Raises:
        CannotTry: the block has hooks or other parts, which need the real outputs of columns.
    """
    parts: dict[str, PlannedPart] = {}
    for path, module in block.named_modules():
        is_known = _is_column(module) or isinstance(module, PlannedRow)
        if module is not block and has_hooks(module):
            raise CannotTry(f"'{path}' has hooks")
        if isinstance(module, PlannedPart) and is_known:
            parts[path] = module
        elif isinstance(module, PlannedPart | PlannedTerm | HoldsExperts):
            raise CannotTry(f"it holds '{path}', which is split in another way")
        elif any(sharding.is_joined(p) for p in module._parameters.values() if p is not None):
            raise CannotTry(f"'{path or type(block).__name__}' has parameters that are split")
    return parts


def can_be_tried(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a call of a block has numbers, and other ranks take part in it."""
    given = tensors_in([*args, *kwargs.values()])
    is_real = bool(given) and not any(map(has_no_data, given))
    return is_real and not regions.is_alone() and not torch.compiler.is_compiling()
