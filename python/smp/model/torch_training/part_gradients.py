"""Gradients that a script reads itself, on ranks that have a part of the model only.

Element by element such a gradient is right. A reduction of it, such as its norm, is that of the
parts of this rank, so results differ over the ranks of a replica: a script that clips by its own
loop scales each part by another factor. So the first use of such a number is logged for each line
of the script. The factors by which gradients are scaled afterwards are compared over the ranks, and
changes of parameters with such gradients are refused.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import smp._C as _C
from smp.model.torch_training.known import known_parameters
from smp.modules.materialize import is_placeholder
from smp.precision.holdings import master_of
from smp.precision.script_writes import script_frame
from smp.precision.shown_gradients import HalfParameter
from smp.world import runtime
from smp.world.log import first_rank_log

_native: Any = torch.Tensor.grad
_OURS = ("torch", "smp")


@dataclass(frozen=True)
class Scaling:
    """The factor by which a script has scaled the gradients of a rank.

    Attributes:
        factor: factor of all gradients.
        tolerance: relative difference of two factors that rounding explains.
        place: line of the script that has computed a number from gradients before.
    """

    factor: float
    tolerance: float
    place: str


class PartGradient(Tensor):
    """A gradient that the script has read, or an elementwise result of one."""

    keeper: PartGradients | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the function, and notes its use of the gradients of this rank."""
        kwargs = kwargs or {}
        caller = script_frame(sys._getframe(1))
        with torch._C.DisableTorchFunctionSubclass():
            if caller is None or PartGradient.keeper is None:
                return func(*args, **kwargs)
            return PartGradient.keeper.run(func, args, kwargs, caller)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copies the values into a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            memo[id(self)] = copied = self.detach().clone()
            return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saves a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)


class PartGradients:
    """Watches how a script uses gradients of models of which this rank has a part.

    Args:
        current: the runtime, whose models count.

    Attributes:
        is_idle: whether nothing was noted since the last step began.
    """

    def __init__(self, current: runtime.Runtime) -> None:
        self._wrapped = current.wrapped
        self._told: set[tuple[str, int]] = set()
        self._shown: dict[int, Tensor] = {}  # gradients, by the address of their values
        self._factors: dict[int, float] = {}  # factors of these gradients
        self._reduced_at: str | None = None  # line that has computed a number from them
        self._tolerance = 0.0
        self._applied: Scaling | None = None
        self._known: tuple[set[int], set[int]] | None = None
        self.is_idle = True
        current.on_shutdown(register_optimizer_step_pre_hook(self._before_update).remove)
        current.on_shutdown(register_optimizer_step_post_hook(self._watch).remove)
        self._half: property = vars(HalfParameter)["grad"]
        self._watched, self._watched_half = self._watching(_native), self._watching(self._half)
        self._watch()
        PartGradient.keeper = self
        current.on_shutdown(self._leave)

    def _watching(self, its: Any) -> property:
        get, set_ = functools.partial(self._get, its), functools.partial(self._set, its)
        return property(get, set_, its.__delete__)

    def _watch(self, *_: Any) -> None:
        nn.Parameter.grad = self._watched  # type: ignore[assignment, method-assign]
        HalfParameter.grad = self._watched_half  # type: ignore[assignment, method-assign]

    def _unwatch(self) -> None:
        nn.Parameter.grad = _native  # type: ignore[method-assign]
        HalfParameter.grad = self._half  # type: ignore[assignment, method-assign]

    def _leave(self) -> None:
        self._make_plain()
        PartGradient.keeper = None
        self._unwatch()
        del nn.Parameter.grad

    # ---- uses by the script

    def _get(self, its: Any, parameter: Tensor) -> Tensor | None:
        grad: Tensor | None = its.__get__(parameter)
        if grad is None or type(grad) is not Tensor:
            return grad
        if _is_script(sys._getframe(1)) and grad.numel():
            if id(parameter) in self._ids_and_memory()[0]:
                grad.__class__ = PartGradient
                self._shown[grad.data_ptr()] = grad
        return grad

    def _set(self, its: Any, parameter: Tensor, value: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            before = its.__get__(parameter) if isinstance(value, PartGradient) else None
            if before is not None and value is not None:
                self._replace(before.data_ptr(), before, value)
            its.__set__(parameter, value)

    def run(self, func: Any, args: Any, kwargs: Any, caller: FrameType) -> Any:
        """Runs a function of torch on gradients of this rank.

        Args:
            func, args, kwargs: the call.
            caller: the frame of the script that calls.
        """
        self.is_idle = False
        inputs = list(_tensors((args, kwargs)))
        parts = [tensor for tensor in inputs if isinstance(tensor, PartGradient)]
        versions = [tensor._version for tensor in inputs]
        noted: list[tuple[Tensor, int, Tensor]] = []
        if self._reduced_at is not None and getattr(func, "__name__", "").endswith("_"):
            noted = [
                (p, p.data_ptr(), p.detach().clone()) for p in parts if p.data_ptr() in self._shown
            ]
        result = func(*args, **kwargs)
        for tensor, version in zip(inputs, versions, strict=True):
            if tensor._version != version and not isinstance(tensor, PartGradient):
                self._refuse_update(tensor)
        for part, address, before in noted:
            self._replace(address, before, part)
        self._look_at(result, parts, caller)
        return result

    def _look_at(self, result: Any, parts: list[PartGradient], caller: FrameType) -> None:
        """Marks elementwise results of gradients, and logs results that are numbers."""
        least = min(part.numel() for part in parts)
        memory = {part.untyped_storage().data_ptr() for part in parts}
        is_number = isinstance(result, float)
        for made in _tensors(result):
            if type(made) is Tensor and made.is_floating_point():
                if made.numel() >= least or made.untyped_storage().data_ptr() in memory:
                    made.__class__ = PartGradient
                else:
                    is_number = True
        if is_number:
            self._tell(caller)

    def _tell(self, caller: FrameType) -> None:
        place = (caller.f_code.co_filename, caller.f_lineno)
        self._reduced_at = f"{place[0]}:{place[1]}"
        if place in self._told:
            return
        self._told.add(place)
        first_rank_log.warning(
            "smp: %s computes a number (a norm, a sum) from .grad, and each rank has the gradients "
            "of its part of the model only, so the number is that of the part. Use "
            "smp.grad_norm(model.parameters()) for the norm over all ranks, and "
            "smp.clip_grad_norm_(model.parameters(), max_norm) to clip",
            self._reduced_at,
        )

    def _refuse_update(self, written: Tensor) -> None:
        """Raises if gradients change a parameter after a number was computed from them."""
        if self._reduced_at is None or not written.numel():
            return
        ids, memory = self._ids_and_memory()
        if id(written) not in ids and written.data_ptr() not in memory:
            return
        raise RuntimeError(
            f"{_C.rank_prefix()}parameters are changed with their gradients after "
            f"{self._reduced_at} has computed a number (a norm, a sum) from .grad: each rank has "
            "the gradients of its part of the model only, so the ranks of one model would change "
            "their parameters by different numbers. Use smp.grad_norm(model.parameters()), the "
            "norm over all ranks, or smp.clip_grad_norm_ in that line"
        )

    def _replace(self, address: int, before: Tensor, after: Tensor) -> None:
        """Notes that a gradient has new values, and their common factor, if there is one."""
        grad = self._shown.get(address)
        if grad is None or after.numel() != grad.numel():
            if grad is not None:
                self._factors[address] = math.nan
            return
        factor = self._factors.pop(address, 1.0)
        if self._reduced_at is not None:
            factor *= self._factor_of(before, after)
        del self._shown[address]
        self._shown[after.data_ptr()] = after
        self._factors[after.data_ptr()] = factor

    def _factor_of(self, before: Tensor, after: Tensor) -> float:
        old, new = before.detach().double(), after.detach().double()
        square = float((old * old).sum())
        if square == 0.0:
            return math.nan
        tolerance = 8 * torch.finfo(before.dtype).eps
        self._tolerance = max(self._tolerance, tolerance)
        factor = float((old * new).sum()) / square
        rest = float((new - factor * old).abs().max())
        return factor if rest <= tolerance * float(new.abs().max()) else math.nan

    # ---- queries by other rooms

    def norm_was_read(self) -> None:
        """Notes that the script has read the norm over all ranks; later factors are alike."""
        self._reduced_at = None

    def scaling(self) -> Scaling | None:
        """Returns the common factor of all gradients of this rank that the script has read.

        It is None if no number was computed from gradients before, or if there are several factors.
        """
        return self._applied or self._scaling()

    def step_begins(self) -> None:
        """Forgets the gradients, and how the script has scaled them."""
        self._make_plain()
        self._factors.clear()
        self._reduced_at = self._applied = self._known = None
        self._tolerance, self.is_idle = 0.0, True

    def _scaling(self) -> Scaling | None:
        if self._reduced_at is None or len(self._shown) < 2:
            return None
        factors = [self._factors.get(address, 1.0) for address in self._shown]
        first = factors[0]
        if all(abs(each - first) <= self._tolerance * abs(first) for each in factors):
            return Scaling(first, self._tolerance, self._reduced_at)
        return None

    def _before_update(self, *_: Any) -> None:
        if self._shown:
            self._applied = self.scaling()
            self._make_plain()
        self._unwatch()  # an update reads each gradient several times

    def _make_plain(self) -> None:
        for grad in self._shown.values():
            grad.__class__ = Tensor
        self._shown.clear()

    def _ids_and_memory(self) -> tuple[set[int], set[int]]:
        """Returns ids and addresses of parameters, and of the tensors updated instead of them."""
        if self._known is None:
            self.is_idle = False
            known = known_parameters(self._wrapped).values()
            both = [tensor for p in known for tensor in (p, master_of(p))]
            here = [tensor for tensor in both if tensor.numel() and not is_placeholder(tensor)]
            self._known = {id(t) for t in both}, {t.data_ptr() for t in here}
        return self._known


def _is_script(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _OURS


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields tensors in arguments or results, at any depth of lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _each(value.values())
    elif isinstance(value, list | tuple):
        yield from _each(value)


def _each(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        yield from _tensors(value)
