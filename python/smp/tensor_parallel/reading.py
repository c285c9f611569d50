"""Gives whole parameters to code that reads split ones from outside of their module.

Models read weights of their children: a tied decoder, attention that multiplies by the weight of a
projection, a norm. Such code was written for whole weights, and all ranks of a tensor-parallel
group run it alike. So it gets a stand-in with the whole shape. Its values are gathered from the
ranks when they are used for the first time, and its gradient is sent back to the ranks' parts.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

import smp._C as _C
from smp.modules.materialize import is_placeholder
from smp.modules.operators import written_tensors
from smp.modules.tracing import is_recorded
from smp.tensor_parallel import regions
from smp.world import runtime
from smp.world.log import first_rank_log

_P = ParamSpec("_P")
_R = TypeVar("_R")
_said: set[str] = set()


class _Here(threading.local):
    """The number of forwards of split modules that this thread is in."""

    def __init__(self) -> None:
        self.depth = 0


_here = _Here()


@dataclass(frozen=True)
class Split:
    """The way in which a parameter is split.

    Attributes:
        name: name of the parameter in the model.
        dim: dim along which it is split.
        sizes: sizes of the parts, by rank.
        has_own_batches: whether the ranks apply it to different samples.
        num_packed: number of consecutive matrices in that dim, each of which is split so.
    """

    name: str
    dim: int
    sizes: Sequence[int]
    has_own_batches: bool
    num_packed: int = 1

    def gather(self, part: Tensor) -> Tensor:
        """Gathers the whole parameter, differentiably. Collective over the group."""
        grad: Literal["sum", "own"] = "sum" if self.has_own_batches else "own"
        if self.num_packed == 1:
            return regions.gather(part, self.dim, self._uneven(), grad=grad)
        apart = part.unflatten(self.dim, (self.num_packed, -1))
        whole = regions.gather(apart, self.dim + 1, self._uneven(), grad=grad)
        return whole.flatten(self.dim, self.dim + 1)

    def own_part(self, grad: Tensor) -> Tensor:
        """Returns this rank's part of a gradient of the whole. Collective where batches differ."""
        apart = grad.unflatten(self.dim, (self.num_packed, -1))
        if self.has_own_batches:
            own = regions.reduce_scatter(apart, self.dim + 1, self._uneven())
        else:
            begin = sum(self.sizes[: regions.rank()])
            own = apart.narrow(self.dim + 1, begin, self.sizes[regions.rank()])
        return own.flatten(self.dim, self.dim + 1)

    def _uneven(self) -> Sequence[int] | None:
        return None if len(set(self.sizes)) == 1 else self.sizes


def own_code(forward: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wraps the forward of a module that expects its parts, not whole parameters."""

    @functools.wraps(forward)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        _here.depth += 1
        try:
            return forward(*args, **kwargs)
        finally:
            _here.depth -= 1

    return run


def is_own_code() -> bool:
    """Returns whether this thread runs a forward that expects parts (see `own_code`)."""
    return _here.depth > 0


def is_outside() -> bool:
    """Returns whether the caller's caller runs as part of a model, and not in `own_code`.

    Scripts, optimizers and checkpoints, which run in no module and no step, expect the parts.
    """
    if _here.depth > 0:
        return False
    if _C.in_context() or runtime.current().steps.running is not None:
        return True
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code in _CALLS or frame.f_globals.get("__name__") in _RECOMPUTES:
            return True
        frame = frame.f_back
    return False


_CALLS = frozenset({nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__})
_RECOMPUTES = frozenset({"torch.utils.checkpoint", "smp.activations.recompute"})


def whole(part: Tensor, split: Split) -> Tensor:
    """Returns the stand-in that outside code gets for a parameter of which this rank has a part."""
    made: Tensor = _Standing.apply(part, split)
    return made


class _Standing(torch.autograd.Function):
    """Turns a part of a parameter into a stand-in for the whole."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return WholeParameter(split, part.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.split.own_part(grads[0].contiguous()), None


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


_METADATA: frozenset[Any] = frozenset(
    _getters("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf")
    | _getters("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested")
    | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.is_contiguous}
    | {Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex}
    | {Tensor.element_size, Tensor.get_device, Tensor.__len__, Tensor.__hash__}
)


class WholeParameter(Tensor):
    """A stand-in for a split parameter, or for a view of it, with the shape of the whole.

    Reading its shape, dtype and device needs no communication. It cannot be written to.
    """

    _split: Split
    _part: Tensor | None
    _whole: Tensor | None
    _is_param = True

    @staticmethod
    def __new__(
        cls, split: Split, part: Tensor | None = None, values: Tensor | None = None
    ) -> WholeParameter:
        like = part if values is None else values
        assert like is not None
        shape = list(like.shape)
        if values is None:
            shape[split.dim] = split.num_packed * sum(split.sizes)
        # Operators check the strides of a view before they choose an algorithm.
        strides = None if values is None else values.stride()
        self: WholeParameter = Tensor._make_wrapper_subclass(
            cls, shape, strides, dtype=like.dtype, device=like.device
        )
        self._split, self._part, self._whole = split, part, values
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"WholeParameter('{self._split.name}', {list(self.shape)})"

    def whole(self) -> Tensor:
        """Returns the whole parameter; gathers it once. Collective the first time."""
        if self._whole is None:
            assert self._part is not None
            if is_placeholder(self._part):
                raise _elsewhere(self._split)
            _say(self._split)
            with torch.no_grad():
                self._whole = self._split.gather(self._part)
            self._part = None
        return self._whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA or not is_recorded():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        # A trace has to see each read of the parameter.
        seen = pytree.tree_map_only(WholeParameter, WholeParameter._seen, (args, kwargs or {}))
        return func(*seen[0], **seen[1])

    def _seen(self) -> Tensor:
        if self._whole is not None:
            return self._whole
        assert self._part is not None
        return self._split.gather(self._part)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        standing = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, WholeParameter)]
        for given in written_tensors(func, args, kwargs):
            if isinstance(given, WholeParameter):
                raise _written(given._split, func)
        if func is torch.ops.aten.detach.default and standing[0]._whole is None:
            return cls(standing[0]._split, standing[0]._part)
        args, kwargs = pytree.tree_map_only(WholeParameter, WholeParameter.whole, (args, kwargs))
        result = func(*args, **kwargs)
        if any(r.alias_info is not None for r in func._schema.returns):
            # A write to a view of the values would be lost.
            split = standing[0]._split
            return pytree.tree_map_only(Tensor, lambda t: cls(split, values=t), result)
        return result


def _elsewhere(split: Split) -> RuntimeError:
    return RuntimeError(
        f"{_C.rank_prefix()}'{split.name}' is read by code outside of its module, and lives on "
        "another pipeline rank; put the module and who reads it on one rank (smp.set_partition)"
    )


def _written(split: Split, func: OpOverload) -> RuntimeError:
    return RuntimeError(
        f"{_C.rank_prefix()}'{split.name}' is written to ({func}) by code outside of its module, "
        "and each tensor-parallel rank holds a part of it; leave the module whole by "
        "smp.set_tensor_parallelism(module, False) before the model is wrapped"
    )


def _say(split: Split) -> None:
    if split.name not in _said:
        _said.add(split.name)
        first_rank_log.warning(
            "smp: '%s' is read by code outside of its module, which gets it whole: it is gathered "
            "from the tensor-parallel ranks each time; smp.set_tensor_parallelism(module, False) "
            "leaves the module whole where that takes too long",
            split.name,
        )
