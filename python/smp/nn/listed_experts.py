"""Experts that are modules of their own, in a list, and are on different ranks.

The code that calls such experts chooses their tokens itself. It runs twice. The first run records
the rows of each call of an expert. They are sent to the ranks of the experts, and results are sent
back. The second run gets the results. See docs/design/experts.md.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.activations.recompute import recompute
from smp.modules.flat import tensors_in
from smp.nn.experts import HoldsExperts, pairs_at_a_time
from smp.nn.module import IndivisibleModule
from smp.nn.planned.borders import draws_from
from smp.nn.run_aside import device_of, has_no_data, random_state_kept, run_aside
from smp.tensor_parallel import regions, sharding, tokens

#: dtype and width of an expert's results; keys are those of the rows and the casts
_Kind = tuple[torch.dtype, int]


@dataclass
class Listed:
    """The experts of one list and their distribution over ranks.

    Attributes:
        name: name of the module that calls the experts, for errors.
        sizes: numbers of experts, by rank.
        has_own_batches: the ranks hold different tokens; else all hold the same.
        experts: all experts; those of other ranks have parameters without elements.
    """

    name: str
    sizes: tuple[int, ...]
    has_own_batches: bool
    experts: list[ListedExpert] = field(default_factory=list)
    _kinds: dict[Any, _Kind] = field(default_factory=dict)

    @property
    def begin(self) -> int:
        """The first expert of this rank."""
        return sharding.begin_of(self.sizes)

    @property
    def own(self) -> list[ListedExpert]:
        return self.experts[self.begin : self.begin + self.sizes[regions.rank()]]

    def draws(self, device: torch.device) -> Any:
        """Returns a context in which experts draw this rank's random numbers.

        Its seed is drawn here. So the second run draws the same numbers as the first one, and all
        ranks draw the same ones after experts of common tokens.
        """
        if not self.experts[0].training:
            return contextlib.nullcontext()
        return draws_from(regions.own_seed(), device)

    def kind_of_results(self, rows: Tensor) -> _Kind:
        """Returns dtype and width of results; first tries an expert on a row of zeros.

        Raises:
            ValueError: the expert does not return a tensor with a row for each of its rows.
        """
        device = rows.device.type
        casts = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        first = next(self.own[0].parameters())
        key = (rows.dtype, rows.shape[-1], casts, first.dtype)
        if key not in self._kinds:
            with torch.no_grad(), random_state_kept(rows.device):
                result: Any = self.own[0].compute(rows.new_zeros(1, rows.shape[-1]))
            if not isinstance(result, Tensor) or result.dim() != 2 or result.shape[0] != 1:
                told = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
                raise ValueError(
                    f"{_C.rank_prefix()}'{self.name}': an expert of a list that is spread makes "
                    f"{told} of one row of {rows.shape[-1]} features; expected one tensor with a "
                    "row for each row; leave the list out of the plan"
                )
            self._kinds[key] = (result.dtype, result.shape[1])
        return self._kinds[key]


@dataclass
class _Asked:
    """The calls of experts by the code of a mixture: numbers of experts, and rows ``[rows, H]``."""

    experts: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)


class _Call(ABC):
    """A run of the code of a mixture; defines what its experts return."""

    def __init__(self, listed: Listed) -> None:
        self.listed = listed

    @abstractmethod
    def result_of(self, number: int, rows: Tensor) -> Tensor:
        """Returns an expert's result for the rows that it is called with."""


class _Asking(_Call):
    """The first run, which records calls and returns zeros."""

    def __init__(self, listed: Listed) -> None:
        super().__init__(listed)
        self.asked = _Asked()

    def result_of(self, number: int, rows: Tensor) -> Tensor:
        self.asked.experts.append(number)
        self.asked.rows.append(rows)
        dtype, width = self.listed.kind_of_results(rows)
        return rows.new_zeros(rows.shape[0], width, dtype=dtype)


class _Answering(_Call):
    """The second run, which returns the results of the same rows."""

    def __init__(self, listed: Listed, asked: _Asked, results: Sequence[Tensor]) -> None:
        super().__init__(listed)
        self._asked, self._results = asked, results
        self._next = 0
        self._differences: list[Tensor] = []

    def result_of(self, number: int, rows: Tensor) -> Tensor:
        idx, self._next = self._next, self._next + 1
        if idx == len(self._results) or self._asked.experts[idx] != number:
            raise self._other()
        before = self._asked.rows[idx]
        if before.shape != rows.shape or before.dtype != rows.dtype:
            raise self._other()
        with torch.no_grad():
            is_other = (before != rows) & ~(before.isnan() & rows.isnan())
            self._differences.append(is_other.any())
        return self._results[idx]

    def check(self) -> None:
        """Raises ValueError if the second run did not make the same calls as the first."""
        has_other = bool(self._differences) and bool(torch.stack(self._differences).any())
        if has_other or self._next != len(self._results):
            raise self._other()

    def _other(self) -> ValueError:
        return ValueError(
            f"{_C.rank_prefix()}'{self.listed.name}' calls its experts with other rows in a second "
            "run; expected that which rows go to which expert depends on no result of an expert, "
            "and on nothing that a run leaves behind; leave the list out of the plan"
        )


class _Alone(_Call):
    """A trial on one rank, in which each expert counts as one of this rank."""

    def result_of(self, number: int, rows: Tensor) -> Tensor:
        own = self.listed.own
        return own[number % len(own)].compute(rows)


_running: contextvars.ContextVar[_Call | None] = contextvars.ContextVar(
    "smp_listed_experts", default=None
)


class ListedExpert(HoldsExperts):
    """Precedes the class of an expert in a spread list."""

    _smp_listed: Listed
    _smp_number: int

    def get_common_tokens(self) -> None:
        self._smp_listed.has_own_batches = False

    def compute(self, rows: Tensor) -> Tensor:
        """Runs the class's own forward on rows; only on the rank of the expert."""
        result: Tensor = super().forward(rows)
        return result

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Computes the same as the class that follows, within the forward of its mixture."""
        listed = self._smp_listed
        call = _running.get()
        if call is None or call.listed is not listed:
            raise ValueError(
                f"{_C.rank_prefix()}expert {self._smp_number} of '{listed.name}' is called from "
                "elsewhere; expected that only the forward of this module calls the experts of the "
                "list, which are on different ranks; leave the list out of the plan"
            )
        x = _only_argument(super().forward, args, kwargs, listed.name)
        y = call.result_of(self._smp_number, x.reshape(-1, x.shape[-1]))
        return y.reshape(*x.shape[:-1], y.shape[-1])


class SpreadMixture(IndivisibleModule):
    """Precedes the class of a module that calls experts of a spread list.

    The class may choose tokens in any way, and call any of the experts with any numbers of rows,
    none included. Collective over the tensor-parallel group.
    """

    _smp_listed: Listed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the same as the class that follows."""
        listed, run = self._smp_listed, super().forward
        given = tensors_in([*args, *kwargs.values()])
        if regions.is_alone() or any(has_no_data(tensor) for tensor in given):
            return _within(_Alone(listed), run, args, kwargs)
        asking = _Asking(listed)
        draws = listed.draws(device_of(given))
        _ask(self, asking, run, args, kwargs)
        with draws:
            results, end = _results_of(self, asking.asked, given)
        answering = _Answering(listed, asking.asked, results)
        output = _within(answering, run, args, kwargs)
        answering.check()
        # Backward has to reach the exchange also on a rank that calls no expert.
        return output if end is None else _tied(output, end, listed)


def _within(
    call: _Call, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    token = _running.set(call)
    try:
        return run(*args, **kwargs)
    finally:
        _running.reset(token)


def _asked_within(call: _Call, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _within(call, run, args, kwargs)


def _ask(
    module: nn.Module,
    asking: _Asking,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Makes the first run, which leaves nothing behind."""
    name = asking.listed.name
    try:
        written = run_aside(module, functools.partial(_asked_within, asking, run), args, kwargs)
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise
        raise RuntimeError(
            f"{_C.rank_prefix()}in '{name}', whose experts are a list that is spread: {error}. Its "
            "forward runs once with zeros as results of experts; parameters of experts on other "
            "ranks have no elements, so experts have to be called, and not their parts; leave the "
            "list out of the plan"
        ) from error
    if written:
        raise ValueError(
            f"{_C.rank_prefix()}'{name}' changes a tensor inside of one of its arguments in place, "
            "which its second run would do again; expected an argument of its own, where the "
            "experts of a list are spread; leave the list out of the plan"
        )


def _results_of(
    module: SpreadMixture, asked: _Asked, given: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor | None]:
    """Returns results of the recorded calls; for no rows also a tensor for backward to reach."""
    listed = module._smp_listed
    rows, codes = _rows_of(listed, asked, given)
    kind = listed.kind_of_results(rows)
    if torch.is_grad_enabled() and not rows.requires_grad:
        rows = rows.detach().requires_grad_()  # backward issues the same collectives on all ranks
    if listed.has_own_batches:
        y = _exchanged(listed, rows, codes, kind)
    else:
        # All ranks make the same calls: each sends some of the rows.
        sizes = sharding.split(rows.shape[0])
        own = codes.narrow(0, sharding.begin_of(sizes), sizes[regions.rank()])
        y = _exchanged(listed, regions.scatter(rows, 0, sizes), own, kind)
        y = regions.gather(y, 0, sizes, grad="own")
    numbers = [part.shape[0] for part in asked.rows]
    results = list(torch.unsafe_split_with_sizes(y[: sum(numbers)], numbers))
    return results, None if sum(numbers) else y.narrow(0, 0, 0).sum()


def _rows_of(listed: Listed, asked: _Asked, given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the rows to send, ``[rows, H]``, and for each twice the number of its expert.

    Calls without rows are at the end, each as a row of zeros and an odd number.
    """
    if not asked.rows:
        like = next((tensor for tensor in given if tensor.is_floating_point()), None)
        if like is None:
            raise ValueError(
                f"{_C.rank_prefix()}'{listed.name}' calls none of its experts here, and has no "
                "argument of floating-point numbers, so the rank cannot take part in what others "
                "do; leave the list out of the plan"
            )
        return like.reshape(-1, like.shape[-1])[:0], like.new_zeros(0, dtype=torch.int64)
    kinds = {(part.dtype, part.shape[1]) for part in asked.rows}
    if len(kinds) > 1:
        raise ValueError(
            f"{_C.rank_prefix()}'{listed.name}' calls its experts with rows of different dtypes or "
            f"widths, {sorted(map(str, kinds))}; expected the same for all experts of a list that "
            "is spread; leave the list out of the plan"
        )
    first = asked.rows[0]
    empty = [n for n, part in zip(asked.experts, asked.rows, strict=True) if not part.shape[0]]
    numbers = torch.tensor(
        [2 * number for number in asked.experts] + [2 * number + 1 for number in empty]
    )
    repeats = torch.tensor([part.shape[0] for part in asked.rows] + [1] * len(empty))
    codes = numbers.repeat_interleave(repeats).to(first.device)
    return torch.cat([*asked.rows, first.new_zeros(len(empty), first.shape[1])]), codes


def _exchanged(listed: Listed, rows: Tensor, codes: Tensor, kind: _Kind) -> Tensor:
    """Returns results ``[rows, width]`` of this rank's rows; zeros for calls without rows."""
    routes = tokens.route((codes // 2).unsqueeze(1), listed.sizes)
    came, numbers = tokens.dispatch((rows, codes), routes)
    y = _computed(listed, came, numbers - 2 * listed.begin, kind, pairs_at_a_time(routes, 1))
    return tokens.combine(y, routes)


def _computed(listed: Listed, rows: Tensor, codes: Tensor, kind: _Kind, limit: int) -> Tensor:
    """Returns the results of this rank's experts for the rows that it received."""
    own = listed.own
    dtype, width = kind
    order = codes.argsort(stable=True)
    # The host needs the numbers of rows of the experts.
    counts = codes.bincount(minlength=2 * len(own)).tolist()
    parts = rows.index_select(0, order).split(counts)
    results = []
    for idx, expert in enumerate(own):
        part, num_empty = parts[2 * idx], counts[2 * idx + 1]
        if counts[2 * idx] + num_empty:
            slices = part.split(limit) if rows.shape[0] > limit and part.shape[0] else (part,)
            for piece in slices:
                if len(slices) == 1:
                    result = expert.compute(piece)
                else:
                    result = recompute(expert.compute, (piece,), modules=(expert,))
                _check_result(listed, result, piece, kind)
                results.append(result)
        results.append(rows.new_zeros(num_empty, width, dtype=dtype))
    y = torch.cat(results).index_select(0, order.argsort())
    if torch.is_grad_enabled():
        # If no expert has run, backward still reaches the rows.
        y = y if y.requires_grad else y + rows[:0].sum().to(dtype)
    return y


def _check_result(listed: Listed, result: Any, rows: Tensor, kind: _Kind) -> None:
    expected = (rows.shape[0], kind[1], kind[0])
    if not isinstance(result, Tensor) or (*result.shape, result.dtype) != expected:
        told = type(result).__name__
        if isinstance(result, Tensor):
            told = f"{result.dtype}{list(result.shape)}"
        raise ValueError(
            f"{_C.rank_prefix()}'{listed.name}': an expert makes {told} of {rows.shape[0]} rows; "
            f"expected {kind[0]}[{rows.shape[0]}, {kind[1]}], as the first one of this rank does; "
            "leave the list out of the plan"
        )


class _Tie(torch.autograd.Function):
    """The identity of its first argument; backward reaches the second, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, end: Tensor) -> Tensor:
        ctx.end = (end.shape, end.dtype, end.device)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        shape, dtype, device = ctx.end
        return grad, torch.zeros(shape, dtype=dtype, device=device)


def _tied(output: Any, end: Tensor, listed: Listed) -> Any:
    """Ties the first floating-point tensor of a module's output to another tensor for backward."""
    if not end.requires_grad:
        return output
    if isinstance(output, Tensor) and output.is_floating_point():
        return _Tie.apply(output, end)
    if isinstance(output, tuple | list):
        for idx, item in enumerate(output):
            if isinstance(item, Tensor) and item.is_floating_point():
                items = [*output[:idx], _Tie.apply(item, end), *output[idx + 1 :]]
                return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    raise ValueError(
        f"{_C.rank_prefix()}'{listed.name}' returns {type(output).__name__}, and calls none of its "
        "experts here; expected a tensor, or a tuple or list with one, to which gradients come as "
        "on the other ranks; leave the list out of the plan"
    )


def _only_argument(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> Tensor:
    bound = list(inspect.signature(forward).bind(*args, **kwargs).arguments.values())
    x = bound[0] if len(bound) == 1 else None
    if not isinstance(x, Tensor) or x.dim() == 0 or not x.is_floating_point():
        raise ValueError(
            f"{_C.rank_prefix()}'{name}' calls an expert with "
            f"{', '.join(type(value).__name__ for value in bound)}; expected one floating-point "
            "tensor of rows, where the experts of a list are spread; leave the list out of the plan"
        )
    return x


_classes: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _in_front(module: nn.Module, front: type[nn.Module]) -> None:
    cls = type(module)
    if (cls, front) not in _classes:
        members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        _classes[cls, front] = type(cls.__name__, (front, cls), members)
    module.__class__ = _classes[cls, front]


def spread_list(mixture: nn.Module, experts: Sequence[nn.Module], listed: Listed) -> None:
    """Makes a module compute with experts of a list on different ranks.

    Args:
        mixture: module whose forward calls the experts.
        experts: experts of all ranks; parameters of other ranks' experts have no elements.
        listed: distribution over ranks; the experts are added to it.
    """
    for number, expert in enumerate(experts):
        _in_front(expert, ListedExpert)
        assert isinstance(expert, ListedExpert)
        expert.__dict__.update(_smp_listed=listed, _smp_number=number)
        listed.experts.append(expert)
    _in_front(mixture, SpreadMixture)
    mixture.__dict__["_smp_listed"] = listed
