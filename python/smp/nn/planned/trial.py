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
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp._device import device_module, is_accelerator
from smp.dropout import places
from smp.modules.flat import tensors_in
from smp.nn.experts import HoldsExperts
from smp.nn.planned.experts import PlannedTerm
from smp.nn.planned.linear import PlannedColumn, PlannedHeads, PlannedPart, PlannedRow, has_hooks
from smp.nn.run_aside import device_of, has_no_data, run_aside
from smp.tensor_parallel import regions, sharding
from smp.world.log import first_rank_log

_log = logging.getLogger("smp")
# Tolerances of norms. An error is a good part of the norm, since the features differ in size.
_TOLERANCE = {torch.float16: 0.05, torch.bfloat16: 0.05}
_OTHERWISE = 1e-2


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
        except _Unknown as reason:
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
            f"the columns. {hints}Otherwise leave these parts out of the plan; "
            "SMP_CHECK_FIRST_STEP=0 trains in spite of this"
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
        if whole.error is not None:
            raise _Unknown(f"with all features it raises {_told(whole.error)}")
        if not whole.given:
            raise _Unknown("it calls no row")
        own = self._run(block, parts, False, inner, args, kwargs)
        if whole.has_drawn or own.has_drawn:
            raise _Unknown("it draws random numbers in eval mode")
        for (row, all_features), (other, features) in zip(whole.given, own.given, strict=False):
            if other != row:
                return f"with a part of the features it comes to '{other}', and not to '{row}'"
            problem = _problem_at(row, parts, all_features, features)
            if problem is not None:
                return problem
        if own.error is not None:
            return f"with a part of the features it raises {_told(own.error)}"
        if len(own.given) != len(whole.given):
            return (
                f"with a part of the features it calls {len(own.given)} rows; expected "
                f"{len(whole.given)}, as with all of them"
            )
        return None

    def _run(
        self,
        block: nn.Module,
        parts: Mapping[str, PlannedPart],
        whole: bool,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> _Runs:
        """Runs the block and undoes its side effects."""
        direct = {id(value) for value in (*args, *kwargs.values())}
        nested = [x for x in tensors_in([*args, *kwargs.values()]) if id(x) not in direct]
        copies = [tensor.detach().clone() for tensor in nested]
        runs = _Runs(block, parts, whole, self.wholes if whole else {}, inner)
        written = run_aside(block, runs, args, kwargs)
        for tensor, copy in zip(nested, copies, strict=True):
            if any(tensor is x for x in written):
                tensor.data.copy_(copy)
        return runs


def _problem_at(
    row: str, parts: Mapping[str, PlannedPart], all_features: Tensor, features: Tensor
) -> str | None:
    """Returns what is wrong with a row's input as the end of a sentence, or None."""
    sizes = list(parts[row]._smp_sizes)
    if all_features.shape[-1] != sum(sizes):
        raise _Unknown(
            f"'{row}' gets {all_features.shape[-1]} features of {sum(sizes)} that it takes"
        )
    begin, num = sharding.begin_of(sizes), sizes[regions.rank()]
    expected = all_features.narrow(-1, begin, num)
    if features.shape != expected.shape:
        return (
            f"'{row}' gets {list(features.shape)} on this rank; expected {list(expected.shape)}, "
            f"{num} of {sum(sizes)} features"
        )
    share = _difference(features, expected)
    if share <= _TOLERANCE.get(features.dtype, _OTHERWISE):
        return None
    return (
        f"what '{row}' gets of a part of the features differs by {share:.0%} from that part of "
        "what it gets of all of them"
    )


class _Unknown(Exception):
    """A reason why a block cannot be tried."""


@dataclass
class _Runs:
    """Runs a block in eval mode and without a graph.

    Attributes:
        given: path and input of each row that is called.
        error: exception of the code.
        has_drawn: the code has drawn from a generator of torch.
    """

    block: nn.Module
    parts: Mapping[str, PlannedPart]
    whole: bool
    attributes: Mapping[str, Mapping[str, Any]]
    inner: Callable[..., Any]
    given: list[tuple[str, Tensor]] = field(default_factory=list)
    error: Exception | None = None
    has_drawn: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        device = device_of(tensors_in([*args, *kwargs.values()]))
        before = _generators(device)
        with torch.no_grad(), places.at(None), self._set():
            try:
                self.inner(*args, **kwargs)
            except Exception as error:  # whatever the code of a model raises
                self.error = error
        self.has_drawn = not all(map(torch.equal, before, _generators(device)))

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
        generator = torch.Generator().manual_seed(1000 * self.seed + self.num_calls)
        self.num_calls += 1
        noise = torch.randn(*input.shape[:-1], width, generator=generator)
        # Features of different size and with a mean, so that functions of all of them differ.
        return (noise + 0.5) * torch.linspace(0.5, 1.5, width)

    def as_given(self, features: Tensor, input: Tensor) -> Tensor:
        """Returns features on the input's device, with the dtype of the part's output."""
        kind, dtype = input.device.type, self.part._matrix().dtype
        is_cast = torch.is_autocast_enabled(kind)
        return features.to(input.device, torch.get_autocast_dtype(kind) if is_cast else dtype)


class _Row(_InPlace):
    def __call__(self, input: Tensor) -> Tensor:
        self.runs.given.append((self.path, input.detach().clone()))
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


def _generators(device: torch.device) -> list[Tensor]:
    """Returns the states of the generators that code on a device draws from."""
    states = [torch.get_rng_state()]
    if is_accelerator(device):
        states.append(device_module(device).get_rng_state(device))
    return states


def _is_column(part: nn.Module) -> bool:
    return isinstance(part, PlannedColumn | PlannedHeads)


def _parts_of(block: nn.Module) -> dict[str, PlannedPart]:
    """Returns the columns and rows of a block, by path.

    Raises:
        _Unknown: the block has hooks or other parts, which need the real outputs of columns.
    """
    parts: dict[str, PlannedPart] = {}
    for path, module in block.named_modules():
        is_known = _is_column(module) or isinstance(module, PlannedRow)
        if module is not block and has_hooks(module):
            raise _Unknown(f"'{path}' has hooks")
        if isinstance(module, PlannedPart) and is_known:
            parts[path] = module
        elif isinstance(module, PlannedPart | PlannedTerm | HoldsExperts):
            raise _Unknown(f"it holds '{path}', which is split in another way")
        elif any(sharding.is_joined(p) for p in module._parameters.values() if p is not None):
            raise _Unknown(f"'{path or type(block).__name__}' has parameters that are split")
    return parts


def can_be_tried(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a call of a block has numbers, and other ranks take part in it."""
    given = tensors_in([*args, *kwargs.values()])
    is_real = bool(given) and not any(map(has_no_data, given))
    return is_real and not regions.is_alone() and not torch.compiler.is_compiling()


def _difference(one: Tensor, other: Tensor) -> float:
    """Returns the norm of the difference relative to the second; only finite elements count."""
    a, b = one.double(), other.double()
    finite = a.isfinite() & b.isfinite()
    a, b = a[finite], b[finite]
    norm = float(b.norm())
    difference = float((a - b).norm())
    return difference / norm if norm else float(difference > 0)


def _told(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
