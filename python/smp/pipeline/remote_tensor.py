"""Tensors whose data stay on another rank until they are needed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

import smp._C as _C
from smp.pipeline import functions

if TYPE_CHECKING:
    from smp._C import Server

    class Modules(Protocol):
        """The part of the pipeline that handles use."""

        device: torch.device

        @property
        def server(self) -> Server: ...

        def call_function(
            self,
            name: str,
            home: RemoteTensor,
            args: tuple[Any, ...],
            kwargs: Mapping[str, Any],
        ) -> Any: ...


_aten = torch.ops.aten


class RemoteTensor(Tensor):
    """A handle of a tensor on another rank.

    Shape, dtype, device and ``requires_grad`` are those of the tensor. As an argument of a module
    on another rank it travels as a name, and its data are sent there directly. All other functions
    that need numbers fetch them: from then on every function of this handle works on an ordinary
    tensor, so that views and in-place operations are PyTorch's own. Operations that bypass Python
    functions (autograd adding two gradients) reach ``__torch_dispatch__`` and work on data only.
    """

    # These are defaults of the class: each remote call makes a handle, which seldom sets its own.
    _modules: Modules
    #: Tensor that replaces this handle here: its data, or another handle after an in-place call.
    _local: Tensor | None = None
    #: State of ``_local`` when it equalled the tensor that the other rank has made.
    _mark: tuple[int, Any] | None = None
    #: Base of a view; ``_recipe`` makes the view from it.
    _whole: RemoteTensor | None = None
    _recipe: functions.Recipe = ()
    _shadow: Tensor | None = None

    @staticmethod
    def make(modules: Modules, sizes: Sequence[int], dtype: torch.dtype) -> RemoteTensor:
        """Makes a handle that is bound to no tensor yet."""
        handle: RemoteTensor = Tensor._make_wrapper_subclass(
            RemoteTensor, sizes, dtype=dtype, device=modules.device
        )
        handle._modules = modules
        return handle

    def local(self) -> Tensor:
        """Returns the local tensor of this handle. The first call waits for the data."""
        if self._local is None:
            if self._whole is not None:
                # The first reader may run without gradients (a matcher in a loss), later ones with.
                with torch.enable_grad():
                    local = functions.apply(self.steps(), localize(self._whole))
            else:
                local = self._modules.server.materialize(self)
            self._mark = _state(local)
            self._local = local
        return self._local

    def steps(self) -> functions.Recipe:
        """Returns how a view is made from its base, ending gradients if the view has none."""
        assert self._whole is not None
        with torch._C.DisableTorchFunctionSubclass():
            is_cut = self._whole.requires_grad and not self.requires_grad
        return (*self._recipe, ("detach", (), ())) if is_cut else self._recipe

    def is_untouched(self) -> bool:
        """Returns whether the tensor is still as the other rank has made it."""
        if self._whole is not None and not self._whole.is_untouched():
            return False
        return self._local is None or (self._mark is not None and _state(self._local) == self._mark)

    def is_away(self) -> bool:
        """Returns whether the data are not here and may stay where they are."""
        base = self if self._whole is None else self._whole
        if self._local is not None or base._local is not None:
            return False
        state = _C.ref_state(base)
        return state is not None and state.is_of_this_step

    def rebind(self, other: Tensor) -> None:
        """Makes this handle refer to ``other`` from now on."""
        self._local = other
        self._mark = None

    def wait(self) -> None:
        """Waits until the data have been made."""
        self._data()

    def _data(self) -> Tensor:
        # Callers must not write to the result.
        if self._local is not None and (self._mark is None or self.is_untouched()):
            return localize(self._local).detach()
        if self._whole is not None:
            return functions.apply(self._recipe, self._whole._data())
        return self._modules.server.fetch(self)

    def __coerce_same_metadata_as_tangent__(
        self, expected_metadata: Any, expected_type: type | None = None
    ) -> Tensor:
        """Returns the data of a gradient, for the backward of what `torch.compile` has made.

        PyTorch calls this method for tensors of other classes than it has compiled for.
        """
        return self._data()

    def _alias(self) -> RemoteTensor:
        with torch._C.DisableTorchFunctionSubclass():
            alias = RemoteTensor.make(self._modules, self.shape, self.dtype)
        if self._whole is not None:
            alias._whole, alias._recipe = self._whole, self._recipe
        else:
            _C.share_ref(alias, self)
        return alias

    def _meta(self) -> Tensor:
        # The shadow has shape and strides without data.
        if self._shadow is None:
            with torch._C.DisableTorchFunctionSubclass():
                self._shadow = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return self._shadow

    def _view(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> RemoteTensor | None:
        # Returns None where PyTorch would make a copy.
        step = (name, args, tuple(sorted(kwargs.items())))
        whole = self._meta()
        shadow = functions.apply((step,), whole)
        if shadow is not whole and shadow._base is None:
            return None
        view = RemoteTensor.make(self._modules, shadow.shape, shadow.dtype)
        view._shadow = shadow
        view._whole = self if self._whole is None else self._whole
        view._recipe = (*self._recipe, step)
        # A method of the view would be kept by autograd, and keep the view alive for ever.
        spread = partial(_spread_gradient, view._recipe, tuple(view._whole._meta().shape))
        with torch._C.DisableTorchFunctionSubclass():
            if self.requires_grad:  # else it was made without gradients from a base that has them
                _C.link_view(view, view._whole, spread)
        return view

    def _pieces(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[RemoteTensor, ...]:
        shadows = getattr(Tensor, name)(self._meta(), *args, **kwargs)
        position = 0 if name == "unbind" else 1
        dim = args[position] if len(args) > position else kwargs.get("dim", 0)
        made = []
        start = 0
        for i, shadow in enumerate(shadows):
            if name == "unbind":
                piece = self._view("select", (dim, i), {})
            else:
                piece = self._view("narrow", (dim, start, shadow.shape[dim]), {})
                start += shadow.shape[dim]
            assert piece is not None
            made.append(piece)
        return tuple(made)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if type(first) is RemoteTensor:
            if func in functions.METADATA:
                if first._local is None:
                    with torch._C.DisableTorchFunctionSubclass():
                        return func(*args, **kwargs)
            elif func in functions.LIKE and first._local is None:
                template = torch.empty(first.shape, dtype=first.dtype, device=first.device)
                return func(template, *_localized(args[1:]), **_localized(kwargs))
            elif func in functions.HOOKS and first._whole is None and first.is_untouched():
                # The call applies to the handle itself, through which all gradients flow.
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            elif first.is_away():
                result = _from_afar(func, first, tuple(args[1:]), kwargs)
                if result is not NotImplemented:
                    return result
        elif func in functions.ARITHMETIC:
            if _may_stay_away(args, kwargs):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            handle = _away_operand(args, kwargs)
            if handle is not None:
                name = functions.ARITHMETIC[func]
                return handle._modules.call_function(name, handle, tuple(args), kwargs)
        localized = _localized(args)
        result = func(*localized, **_localized(kwargs))
        # Functions that work in place, or have nothing to do, return the very tensor they got.
        if type(first) is RemoteTensor and result is localized[0]:
            return first
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.detach.default:
            return args[0]._alias()
        name = functions.AT_HOME.get(func)
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


def _from_afar(
    func: Callable[..., Any],
    handle: RemoteTensor,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Returns ``func``'s result without the data; NotImplemented when it needs them here."""
    if func in functions.ARITHMETIC:
        if _may_stay_away((handle, *args), kwargs):
            with torch._C.DisableTorchFunctionSubclass():
                return func(handle, *args, **kwargs)
        if _away_operand((handle, *args), kwargs) is not None:
            name = functions.ARITHMETIC[func]
            return handle._modules.call_function(name, handle, (handle, *args), kwargs)
    elif func in functions.VIEW_ATTRIBUTES:
        name, view_args = functions.VIEW_ATTRIBUTES[func]
        view = handle._view(name, view_args, {})
        return NotImplemented if view is None else view
    elif func in functions.PIECES:
        if functions.is_plain(args) and functions.is_plain(list(kwargs.values())):
            pieces = handle._pieces(functions.PIECES[func], args, kwargs)
            return iter(pieces) if func is Tensor.__iter__ else pieces
    elif func in functions.VIEWS:
        name = functions.VIEWS[func]
        plain = functions.is_plain(args) and functions.is_plain(list(kwargs.values()))
        if plain and (name != "__getitem__" or functions.is_basic_index(args[0])):
            view = handle._view(name, args, kwargs)
            if view is not None:
                return view
    elif func in functions.IN_PLACE:
        if handle._whole is None and _may_stay_away((handle, *args), kwargs):
            if torch.is_grad_enabled() or not handle.requires_grad:
                handle.rebind(functions.IN_PLACE[func](handle, *args, **kwargs))
                return handle
    elif func in functions.SHIPPED:
        name = functions.SHIPPED[func]
        if name == "contiguous" and not args and not kwargs and handle._meta().is_contiguous():
            return handle
        if name == "float" and handle.dtype == torch.float32:
            return handle
        if functions.writes_in_place(name, args, kwargs):
            return NotImplemented
        if name == "to":
            keeps = functions.keeps_type(handle, args, kwargs)
            if keeps is not False:
                return handle if keeps else NotImplemented
        return handle._modules.call_function(name, handle, (handle, *args), kwargs)
    return NotImplemented


def resolve(tensor: Tensor) -> Tensor:
    """Returns the local tensor of a handle that was changed here; other tensors as they are."""
    while isinstance(tensor, RemoteTensor) and not tensor.is_untouched():
        tensor = tensor.local()
    return tensor


def localize(tensor: Tensor) -> Tensor:
    """Returns an ordinary tensor for any ``tensor``."""
    while isinstance(tensor, RemoteTensor):
        tensor = tensor.local()
    return tensor


def rewrite(tensor: Tensor, changed: Tensor) -> None:
    """Gives ``tensor``, which a module on another rank has written to, its new contents."""
    # Data on this rank may have views here, which have to follow.
    if isinstance(tensor, RemoteTensor) and tensor._whole is None and tensor._local is None:
        tensor.rebind(changed)
    else:
        localize(tensor).copy_(changed)


def _spread_gradient(recipe: functions.Recipe, sizes: tuple[int, ...], grad: Tensor) -> Tensor:
    """Returns the gradient of the base from that of a view, where autograd meets the view."""
    grad = localize(grad)
    whole = torch.zeros(sizes, dtype=grad.dtype, device=grad.device)
    if any(name in functions.REPEATING for name, _, _ in recipe):
        with torch.enable_grad():
            view = functions.apply(recipe, whole.requires_grad_())
        return torch.autograd.grad(view, whole, grad)[0]
    functions.apply(recipe, whole).copy_(grad)
    return whole


def _state(tensor: Tensor) -> tuple[int, Any]:
    return (0 if tensor.is_inference() else tensor._version), tensor.grad_fn


def view_of(tensor: Tensor, view: _C.ViewOfArgument) -> Tensor:
    """Returns a result that is a view of an argument, made from the caller's own tensor."""
    tensor = resolve(tensor)
    if isinstance(tensor, RemoteTensor) and tensor.is_away() and tensor._whole is None:
        geometry = (tuple(view.sizes), tuple(view.strides), view.offset)
        made = tensor._view("as_strided", geometry, {})
        assert made is not None
        return made
    local = localize(tensor)
    return local.as_strided(view.sizes, view.strides, local.storage_offset() + view.offset)


def _replaced(value: Any, read: Callable[[RemoteTensor], Tensor]) -> Any:
    """Returns ``value`` with each handle in it replaced by the result of ``read``."""
    kind = type(value)
    if kind is RemoteTensor:
        return read(value)
    if kind is tuple or kind is list:
        return kind(_replaced(item, read) for item in value)
    if kind is dict:
        return {key: _replaced(item, read) for key, item in value.items()}
    return value


_localized = partial(_replaced, read=RemoteTensor.local)
_with_data = partial(_replaced, read=RemoteTensor._data)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _may_stay_away(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether operands can stay away: alike floating handles, or one and a number."""
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
        if first._whole is not None or not first.is_away() or not first.dtype.is_floating_point:
            return False
        for other in args[1:]:
            if type(other) is RemoteTensor:
                if other._whole is not None or not other.is_away():
                    return False
                if other.shape != first.shape or other.dtype != first.dtype:
                    return False
            elif not _is_number(other):
                return False
    return True


def _away_operand(args: Sequence[Any], kwargs: Mapping[str, Any]) -> RemoteTensor | None:
    """Returns the handle in a sum of a handle and a tensor of this rank, or None.

    The tensor is sent to the rank of the handle. Such a sum is the residual connection of a block
    that begins here and ends on a later rank, and the code that follows is there as well.
    """
    if len(args) != 2 or any(key != "alpha" for key in kwargs):
        return None
    handles = [arg for arg in args if type(arg) is RemoteTensor]
    locals_ = [arg for arg in args if type(arg) is Tensor]
    if len(handles) != 1 or len(locals_) != 1:
        return None
    handle, local = handles[0], locals_[0]
    if handle._whole is not None or not handle.is_away() or not handle.dtype.is_floating_point:
        return None
    same = handle.shape == local.shape and handle.dtype == local.dtype
    return handle if same and handle.device == local.device else None


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
    return handles[0]._modules.server.compute(name, handles, bool(numbers), scalar)
