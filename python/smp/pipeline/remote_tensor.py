"""Tensors whose data are on another rank until somebody needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smp import _C

if TYPE_CHECKING:
    from smp._C import Server

_aten = torch.ops.aten


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


#: What a handle answers without its data.
_METADATA: frozenset[Any] = frozenset(
    _getters(
        *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf"),
        *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn"),
        *("is_mps", "is_xpu", "is_xla", "is_ipu", "is_vulkan", "is_maia", "is_sparse_csr"),
        *("itemsize", "nbytes", "names", "output_nr"),
    )
    | {
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride),
        *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex),
        *(Tensor.is_signed, Tensor.element_size, Tensor.get_device, Tensor.is_contiguous),
        *(Tensor.storage_offset, Tensor.__len__, Tensor.__hash__, torch.numel, Tensor.is_inference),
    }
)

#: Arithmetic that is done at the home of the tensors, by operator.
_AT_HOME: dict[Any, str] = {
    _aten.add.Tensor: "add",
    _aten.sub.Tensor: "sub",
    _aten.mul.Tensor: "mul",
    _aten.div.Tensor: "div",
    _aten.mul.Scalar: "mul",
    _aten.div.Scalar: "div",
    _aten.neg.default: "neg",
}

#: Python functions that lead to the operators above and to nothing else.
_ARITHMETIC: frozenset[Any] = frozenset(
    {
        *(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__),
        *(torch.sub, Tensor.sub, Tensor.__sub__),
        *(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__),
        *(torch.div, Tensor.div, Tensor.__truediv__, torch.neg, Tensor.neg, Tensor.__neg__),
    }
)


class RemoteTensor(Tensor):
    """A handle of a tensor on another rank.

    Shape, dtype, device and ``requires_grad`` are true. As an argument of a module on another rank
    it travels as a name and its data go there directly. Anything else that needs numbers fetches
    them: from then on every function of this handle works on an ordinary tensor behind it, so that
    views and in-place operations are PyTorch's own. Operations that bypass Python functions
    (autograd adding two gradients) reach ``__torch_dispatch__`` and work on data only.
    """

    _server: Server
    _local: Tensor | None
    _mark: tuple[int, Any] | None

    @staticmethod
    def make(
        server: Server, sizes: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> RemoteTensor:
        """A handle that stands for nothing yet."""
        handle: RemoteTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            RemoteTensor, sizes, dtype=dtype, device=device
        )
        handle._server = server
        handle._local = None
        handle._mark = None
        return handle

    def local(self) -> Tensor:
        """The ordinary tensor behind this handle. Waits for the data the first time."""
        if self._local is None:
            local = self._server.materialize(self)
            self._mark = _state(local)
            self._local = local
        return self._local

    def is_untouched(self) -> bool:
        """Is the tensor still what the other rank has made?"""
        return self._local is None or (
            self._mark is not None and _state(self._local) == self._mark
        )

    def rebind(self, other: Tensor) -> None:
        """From now on this handle is ``other``."""
        self._local = other
        self._mark = None

    def _data(self) -> Tensor:
        # Not to be written to.
        if self._local is not None and self.is_untouched():
            return self._local.detach()
        return self._server.fetch(self)

    def _alias(self) -> RemoteTensor:
        with torch._C.DisableTorchFunctionSubclass():
            alias = RemoteTensor.make(self._server, self.shape, self.dtype, self.device)
        _C.share_ref(alias, self)
        return alias

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            first = args[0]
            if isinstance(first, RemoteTensor) and first._local is None:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
        elif func in _ARITHMETIC and _may_stay_away(args, kwargs):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*_localized(args), **_localized(kwargs))

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.detach.default:
            return args[0]._alias()
        name = _AT_HOME.get(func)
        if name is not None and _may_stay_away(args, kwargs):
            return _compute_at_home(name, args, kwargs)
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and isinstance(value, RemoteTensor):
                    raise RuntimeError(
                        f"{_C.rank_prefix()}{func} writes to a result of a module on another rank "
                        "in a way that smp cannot follow; write to a copy of it (.clone())"
                    )
        return func(*_with_data(args), **_with_data(kwargs))


def resolve(tensor: Tensor) -> Tensor:
    """What ``tensor`` is now: a handle that was changed here is the local tensor behind it."""
    while isinstance(tensor, RemoteTensor) and not tensor.is_untouched():
        tensor = tensor.local()
    return tensor


def localize(tensor: Tensor) -> Tensor:
    """An ordinary tensor, whatever ``tensor`` is."""
    while isinstance(tensor, RemoteTensor):
        tensor = tensor.local()
    return tensor


def rewrite(tensor: Tensor, changed: Tensor) -> None:
    """Gives ``tensor``, which a module on another rank has written to, its new contents."""
    if isinstance(tensor, RemoteTensor) and tensor.is_untouched():
        tensor.rebind(changed)
    else:
        localize(tensor).copy_(changed)


def _state(tensor: Tensor) -> tuple[int, Any]:
    return (0 if tensor.is_inference() else tensor._version), tensor.grad_fn


def _localized(value: Any) -> Any:
    kind = type(value)
    if kind is RemoteTensor:
        return value.local()
    if kind is tuple or kind is list:
        return kind(_localized(item) for item in value)
    if kind is dict:
        return {key: _localized(item) for key, item in value.items()}
    return value


def _with_data(value: Any) -> Any:
    kind = type(value)
    if kind is RemoteTensor:
        return value._data()
    if kind is tuple or kind is list:
        return kind(_with_data(item) for item in value)
    if kind is dict:
        return {key: _with_data(item) for key, item in value.items()}
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _may_stay_away(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Handles of one shape and floating dtype without data here, or one and a number."""
    if any(key != "alpha" or not _is_number(value) for key, value in kwargs.items()):
        return False
    first = args[0]
    if type(first) is not RemoteTensor:
        if not (_is_number(first) and len(args) == 2):
            return False
        first, args = args[1], (args[1], first)
        if type(first) is not RemoteTensor:
            return False
    with torch._C.DisableTorchFunctionSubclass():
        if first._local is not None or not first.dtype.is_floating_point:
            return False
        for other in args[1:]:
            if type(other) is RemoteTensor:
                if (
                    other._local is not None
                    or other.shape != first.shape
                    or other.dtype != first.dtype
                ):
                    return False
            elif not _is_number(other):
                return False
    return not any(_is_kept(arg) for arg in args if type(arg) is RemoteTensor)


def _is_kept(handle: RemoteTensor) -> bool:
    state = _C.ref_state(handle)
    return state is None or state[1]


def _compute_at_home(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    handles = [arg for arg in args if type(arg) is RemoteTensor]
    numbers = [arg for arg in args if type(arg) is not RemoteTensor]
    if name in ("add", "sub", "div") and (len(handles) + len(numbers) > 1):
        plain = name == "div" and len(handles) == 1 and type(args[0]) is RemoteTensor
        summed = name in ("add", "sub") and len(handles) == 2
        if not (plain or summed):
            args, kwargs = _with_data(args), _with_data(kwargs)
            return getattr(_aten, name).Tensor(*args, **kwargs)
    scalar = float(kwargs.get("alpha", 1)) if not numbers else float(numbers[0])
    return handles[0]._server.compute(name, handles, bool(numbers), scalar)
