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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.modules.flat import tensors_in
from smp.nn.draws import draws_from
from smp.nn.experts import HoldsExperts, Spread, dispatch, pairs_at_a_time, run_slice
from smp.nn.module import IndivisibleModule, class_in_front
from smp.nn.run_aside import device_of, has_no_data, random_state_kept, run_aside
from smp.tensor_parallel import regions

#: dtype and width of an expert's results; keys are those of the rows and the casts
_Kind = tuple[torch.dtype, int]
#: function of the number of an expert and the rows of a call; returns the expert's result
_Answer = Callable[[int, Tensor], Tensor]


@dataclass
class Listed(Spread):
    """The experts of one list and their distribution over ranks.

    Attributes:
        experts: all experts; those of other ranks have parameters without elements.
    """

    experts: list[ListedExpert] = field(default_factory=list)
    _kinds: dict[Any, _Kind] = field(default_factory=dict)

    @property
    def own(self) -> list[ListedExpert]:
        return self.experts[self.begin : self.begin + self.num_own]

    def draws(self, device: torch.device) -> Any:
        """Returns a context in which experts draw this rank's random numbers.

        Its seed is drawn here. So the second run draws the same numbers as the first one, and all
        ranks draw the same ones after experts of common tokens.
        """
        if not self.experts[0].training:
            return contextlib.nullcontext()
        return draws_from(regions.own_seed(), device)

    def kind_of_results(self, rows: Tensor) -> _Kind:
        """Returns dtype and width of results; first tries an expert on a row of zeros."""
        device = rows.device.type
        casts = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        first = next(self.own[0].parameters())
        key = (rows.dtype, rows.shape[-1], casts, first.dtype)
        if key not in self._kinds:
            row = rows.new_zeros(1, rows.shape[-1])
            with torch.no_grad(), random_state_kept(rows.device):
                self._kinds[key] = self.kind_of(self.own[0].compute(row), row)
        return self._kinds[key]

    def kind_of(self, result: Any, rows: Tensor, wanted: _Kind | None = None) -> _Kind:
        """Returns dtype and width of an expert's result for rows.

        Raises:
            ValueError: it is no tensor with a row for each row, or not of the wanted kind.
        """
        made = type(result).__name__
        if isinstance(result, Tensor):
            made = f"{result.dtype}{list(result.shape)}"
            if result.dim() == 2 and result.shape[0] == rows.shape[0]:
                kind = (result.dtype, result.shape[1])
                if wanted in (None, kind):
                    return kind
        of_all = (
            "" if wanted is None else f" of {wanted[0]} and width {wanted[1]}, as the first one"
        )
        raise self.error(
            f": an expert of a list that is spread makes {made} of rows of shape "
            f"{list(rows.shape)}; expected one tensor with a row for each row{of_all}"
        )

    def error(self, problem: str) -> ValueError:
        """Returns the error for a list that cannot be spread."""
        return ValueError(
            f"{_C.rank_prefix()}'{self.name}'{problem}; leave the list out of the plan"
        )


# ---- the two runs


@dataclass
class _Calls:
    """The calls of experts in the first run: numbers of experts, and rows ``[rows, H]``."""

    listed: Listed
    experts: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

    def record(self, number: int, rows: Tensor) -> Tensor:
        """Records a call; returns zeros in the place of the result."""
        self.experts.append(number)
        self.rows.append(rows)
        dtype, width = self.listed.kind_of_results(rows)
        return rows.new_zeros(rows.shape[0], width, dtype=dtype)


class _Results:
    """The results of the recorded calls, for a second run that makes the same calls."""

    def __init__(self, calls: _Calls, results: Sequence[Tensor]) -> None:
        self._calls, self._results = calls, results
        self._next = 0
        self._differences: list[Tensor] = []

    def result_of(self, number: int, rows: Tensor) -> Tensor:
        """Returns the result of the next call, which has to be this one."""
        idx, self._next = self._next, self._next + 1
        if idx == len(self._results) or self._calls.experts[idx] != number:
            raise self._other()
        before = self._calls.rows[idx]
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
        return self._calls.listed.error(
            " calls its experts with other rows in a second run; expected that which rows go to "
            "which expert depends on no result of an expert, and on nothing that a run leaves "
            "behind"
        )


def _of_own(listed: Listed, number: int, rows: Tensor) -> Tensor:
    """Returns a result in a trial on one rank, where each expert counts as one of this rank."""
    return listed.own[number % listed.num_own].compute(rows)


_running: contextvars.ContextVar[tuple[Listed, _Answer] | None] = contextvars.ContextVar(
    "smp_listed_experts", default=None
)


def _within(
    listed: Listed, answer: _Answer, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Runs the code of a mixture, whose experts return what ``answer`` returns."""
    token = _running.set((listed, answer))
    try:
        return run(*args, **kwargs)
    finally:
        _running.reset(token)


# ---- the modules


class ListedExpert(HoldsExperts):
    """Precedes the class of an expert in a spread list."""

    _smp_spread: Listed
    _smp_number: int

    def compute(self, rows: Tensor) -> Tensor:
        """Runs the class's own forward on rows; only on the rank of the expert."""
        result: Tensor = super().forward(rows)
        return result

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Computes the same as the class that follows, within the forward of its mixture."""
        listed, running = self._smp_spread, _running.get()
        if running is None or running[0] is not listed:
            raise ValueError(
                f"{_C.rank_prefix()}expert {self._smp_number} of '{listed.name}' is called from "
                "elsewhere; expected that only the forward of this module calls the experts of the "
                "list, which are on different ranks; leave the list out of the plan"
            )
        x = _only_argument(super().forward, args, kwargs, listed)
        y = running[1](self._smp_number, x.reshape(-1, x.shape[-1]))
        return y.reshape(*x.shape[:-1], y.shape[-1])


class SpreadMixture(IndivisibleModule):
    """Precedes the class of a module that calls experts of a spread list.

    The class may choose tokens in any way, and call any of the experts with any numbers of rows,
    none included. Collective over the tensor-parallel group.
    """

    _smp_spread: Listed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the same as the class that follows."""
        listed, run = self._smp_spread, super().forward
        given = tensors_in([*args, *kwargs.values()])
        if regions.is_alone() or any(has_no_data(tensor) for tensor in given):
            return _within(listed, functools.partial(_of_own, listed), run, *args, **kwargs)
        calls = _Calls(listed)
        draws = listed.draws(device_of(given))
        _record(self, calls, run, args, kwargs)
        with draws:
            found, end = _results_of(calls, given)
        results = _Results(calls, found)
        output = _within(listed, results.result_of, run, *args, **kwargs)
        results.check()
        # Backward has to reach the exchange also on a rank that calls no expert.
        return output if end is None else _tied(output, end, listed)


def _record(
    module: nn.Module,
    calls: _Calls,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Makes the first run, which leaves nothing behind."""
    listed = calls.listed
    try:
        recorded = functools.partial(_within, listed, calls.record, run)
        written = run_aside(module, recorded, args, kwargs)
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise
        raise RuntimeError(
            f"{_C.rank_prefix()}in '{listed.name}', whose experts are a list that is spread: "
            f"{error}. Its forward runs once with zeros as results of experts; parameters of "
            "experts on other ranks have no elements, so experts have to be called, and not their "
            "parts; leave the list out of the plan"
        ) from error
    if written:
        raise listed.error(
            " changes a tensor inside of one of its arguments in place, which its second run would "
            "do again; expected an argument of its own, where the experts of a list are spread"
        )


def _results_of(calls: _Calls, given: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | None]:
    """Returns results of the recorded calls; for no rows also a tensor for backward to reach."""
    listed = calls.listed
    rows, codes = _rows_of(calls, given)
    kind = listed.kind_of_results(rows)
    if torch.is_grad_enabled() and not rows.requires_grad:
        rows = rows.detach().requires_grad_()  # backward issues the same collectives on all ranks
    compute = functools.partial(_compute, listed, kind)
    y = dispatch(listed, (rows, codes), (codes // 2).unsqueeze(1), compute)
    numbers = [part.shape[0] for part in calls.rows]
    results = list(torch.unsafe_split_with_sizes(y[: sum(numbers)], numbers))
    return results, None if sum(numbers) else y.narrow(0, 0, 0).sum()


def _rows_of(calls: _Calls, given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the rows to send, ``[rows, H]``, and for each twice the number of its expert.

    Calls without rows are at the end, each as a row of zeros and an odd number.
    """
    if not calls.rows:
        like = next((tensor for tensor in given if tensor.is_floating_point()), None)
        if like is None:
            raise calls.listed.error(
                " calls none of its experts here, and has no argument of floating-point numbers, "
                "so the rank cannot take part in what others do"
            )
        return like.reshape(-1, like.shape[-1])[:0], like.new_zeros(0, dtype=torch.int64)
    kinds = {(part.dtype, part.shape[1]) for part in calls.rows}
    if len(kinds) > 1:
        raise calls.listed.error(
            f" calls its experts with rows of different dtypes or widths, "
            f"{sorted(map(str, kinds))}; expected the same for all experts of a list that is spread"
        )
    first = calls.rows[0]
    empty = [n for n, part in zip(calls.experts, calls.rows, strict=True) if not part.shape[0]]
    numbers = torch.tensor([2 * n for n in calls.experts] + [2 * n + 1 for n in empty])
    repeats = torch.tensor([part.shape[0] for part in calls.rows] + [1] * len(empty))
    codes = numbers.repeat_interleave(repeats).to(first.device)
    return torch.cat([*calls.rows, first.new_zeros(len(empty), first.shape[1])]), codes


def _compute(listed: Listed, kind: _Kind, came: Sequence[Tensor], routes: _C.TokenRoutes) -> Tensor:
    """Returns the results of this rank's experts for the rows that it received.

    Rows in place of calls without rows give zeros.
    """
    rows, codes = came[0], came[1] - 2 * listed.begin
    limit = pairs_at_a_time(routes, 1)
    dtype, width = kind
    order = codes.argsort(stable=True)
    # The host needs the numbers of rows of the experts.
    counts = codes.bincount(minlength=2 * listed.num_own).tolist()
    parts = rows.index_select(0, order).split(counts)
    results = []
    for idx, expert in enumerate(listed.own):
        part, num_empty = parts[2 * idx], counts[2 * idx + 1]
        if counts[2 * idx] + num_empty:
            slices = part.split(limit) if rows.shape[0] > limit and part.shape[0] else (part,)
            for piece in slices:
                result = run_slice(expert.compute, (piece,), len(slices), expert)
                listed.kind_of(result, piece, kind)
                results.append(result)
        results.append(rows.new_zeros(num_empty, width, dtype=dtype))
    y = torch.cat(results).index_select(0, order.argsort())
    if torch.is_grad_enabled():
        # If no expert has run, backward still reaches the rows.
        y = y if y.requires_grad else y + rows[:0].sum().to(dtype)
    return y


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
    raise listed.error(
        f" returns {type(output).__name__}, and calls none of its experts here; expected a tensor, "
        "or a tuple or list with one, to which gradients come as on the other ranks"
    )


def _only_argument(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], listed: Listed
) -> Tensor:
    bound = list(inspect.signature(forward).bind(*args, **kwargs).arguments.values())
    x = bound[0] if len(bound) == 1 else None
    if not isinstance(x, Tensor) or x.dim() == 0 or not x.is_floating_point():
        raise listed.error(
            f" calls an expert with {', '.join(type(value).__name__ for value in bound)}; expected "
            "one floating-point tensor of rows, where the experts of a list are spread"
        )
    return x


def spread_list(mixture: nn.Module, experts: Sequence[nn.Module], listed: Listed) -> None:
    """Makes a module compute with experts of a list on different ranks.

    Args:
        mixture: module whose forward calls the experts.
        experts: experts of all ranks; parameters of other ranks' experts have no elements.
        listed: distribution over ranks; the experts are added to it.
    """
    for number, expert in enumerate(experts):
        expert.__class__ = class_in_front(ListedExpert, type(expert))
        assert isinstance(expert, ListedExpert)
        expert.__dict__.update(_smp_spread=listed, _smp_number=number)
        listed.experts.append(expert)
    mixture.__class__ = class_in_front(SpreadMixture, type(mixture))
    mixture.__dict__["_smp_spread"] = listed
