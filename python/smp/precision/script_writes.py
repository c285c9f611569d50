"""Applies writes of a script between steps to parameters that are partial or have masters.

Code for all parameters clips them, lets them decay, or multiplies them with masks. An elementwise
operator does the same to the elements that each rank holds: the shard of a parameter, its master
in float32, nothing of a parameter of another pipeline rank. Other writes, and all reads of values
that are elsewhere, are errors: a placeholder has no memory, so an access to it raises
(`smp.modules.materialize`).

While a model's forward or backward runs, writes and reads are not intercepted.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import smp._C as _C
from smp._torch_releases import optimize_together
from smp.modules import packed
from smp.modules.materialize import is_placeholder
from smp.modules.operators import written_tensors
from smp.modules.watching import watch
from smp.precision.holdings import write_values
from smp.tensor_parallel import reading
from smp.tensor_parallel.sharding import interval_of, whole_shape
from smp.world.log import first_rank_log

_OWN = "_smp_own"
_WHOLE = "smp.whole_parameters"
_ACCESSORS = frozenset({"__get__", "__set__"})
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
#: Modules that are not intercepted: the library, PyTorch's optimizers, and `nn.Module`.
_WITHOUT = ("smp.", "torch.optim.", nn.Module.__module__)
_NUMBER = "computes a number (a norm, a sum) from '"
_MIXTURE = "mixes or draws elements of '"
_aten = torch.ops.aten
#: Elementwise operators that PyTorch does not tag as such, since they have no arithmetic.
_PLAIN_WRITES = (_aten.fill_, _aten.zero_, _aten.copy_, _aten.masked_fill_)
_PLAIN = (*_PLAIN_WRITES, _aten.clone, _aten._to_copy, _aten.detach, _aten.lift_fresh)


@dataclass
class OwnPiece:
    """The part of a parameter that is on this rank.

    Attributes:
        name: name in the whole model.
        begin: first element of ``piece`` in the flattened parameter.
        piece: memory of these elements in the model's dtype; empty if there are none.
        master: the same elements with more digits, or None.
        changed: called after a write.
    """

    name: str
    begin: int
    piece: Tensor
    master: Tensor | None
    changed: Callable[[], None]

    def __reduce__(self) -> Any:
        return type(None), ()  # files that save a parameter do not have its state in training

    @property
    def numel(self) -> int:
        return self.piece.numel()

    def cut(self, value: Tensor, shape: torch.Size) -> Tensor:
        """Returns the elements of an operator's argument that belong to this part."""
        if value.dim() == 0:
            return value
        flat = value.expand(shape).reshape(-1)
        return flat[self.begin : self.begin + self.numel].view(self.piece.shape)


def own(parameter: nn.Parameter, part: OwnPiece) -> None:
    """Lets writes of the script reach this rank's part of a parameter.

    Args:
        parameter: parameter that stays the same object and changes its class.
        part: part of it on this rank.

    Quantized weights are frozen, and keep the class that their layers ask for.
    """
    if packed.is_packed(parameter):
        return
    setattr(parameter, _OWN, part)
    if not isinstance(parameter, ScriptParameter):
        parameter.__class__ = ScriptParameter
        optimize_together(ScriptParameter)


def disown(parameter: nn.Parameter) -> None:
    """Makes an owned parameter an ordinary one again."""
    parameter.__dict__.pop(_OWN, None)
    if type(parameter) is ScriptParameter:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def _call(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs, name = kwargs or {}, getattr(func, "__name__", "")
    caller = sys._getframe(1).f_globals.get("__name__", "")
    with torch._C.DisableTorchFunctionSubclass():
        if caller.startswith(_WITHOUT) and caller != AveragedModel.__module__:
            return func(*args, **kwargs)
        known = {_key(t): parameter for t, parameter in _watched(args, kwargs)}
        if not known:
            return func(*args, **kwargs)
        if func == _SET_DATA and isinstance(args[0], ScriptParameter):
            _refuse_memory(args[0])
        # PyTorch names functions that write so; the mode sees whether one does.
        writes = "out" in kwargs or (name.endswith("_") and name not in _ACCESSORS)
        mode = _Writes(known) if writes else _Mixing(known)
        try:
            with mode if writes or mode.split else contextlib.nullcontext():
                result = func(*args, **kwargs)
        except RuntimeError as error:
            _explain_slices(known.values(), error)
            raise
        _refuse_part_of_loss(result, known)
        _tell_of_slices(result, known, mode, sys._getframe(1))
        return pytree.tree_map_only(Tensor, lambda t: _shown(t, known), result)


def _refuse_part_of_loss(result: Any, known: Mapping[int, nn.Parameter]) -> None:
    """Raises if a loss would depend on this rank's slice of a parameter."""
    split = [p for p in known.values() if interval_of(p) is not None]
    if not split or reading.is_own_code():
        return
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None and _key(leaf) not in known:
            part: OwnPiece = getattr(split[0], _OWN)
            raise RuntimeError(
                f"{_C.rank_prefix()}code outside of its module computes with '{part.name}' "
                f"({leaf.grad_fn.name()}), and each tensor-parallel rank holds a part of that "
                f"parameter, here {list(split[0].shape)} of {whole_shape(split[0])}; read it as "
                "an attribute of its module (module.weight) inside of the step function, use the "
                f"weight decay of the optimizer, or read it in `with {_WHOLE}(model):` between "
                "steps"
            )


def _tell_of_slices(
    result: Any, known: Mapping[int, nn.Parameter], mode: _Mixing, frame: FrameType
) -> None:
    """Logs, once for each line of the script, that numbers were computed from a slice.

    Args:
        result: result of a function.
        known: parameters among its arguments.
        mode: mode that saw the operators of the function.
        frame: frame of the caller.
    """
    split = [p for p in known.values() if p.numel() < math.prod(whole_shape(p))]
    caller = script_frame(frame) if split and not reading.is_own_code() else None
    if caller is None:
        return
    least = min(parameter.numel() for parameter in split)
    for leaf in pytree.tree_leaves(result):
        is_tensor = isinstance(leaf, Tensor) and leaf.is_floating_point()
        is_number = isinstance(leaf, float) or (is_tensor and leaf.numel() < least)
        is_number &= not isinstance(mode, _Writes)  # which returns what it wrote to
        if not (is_number or (is_tensor and mode.mixes)):
            continue
        place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        is_copy = is_tensor and _key(leaf) in known and not mode.mixes
        if is_copy or not first_rank_log.is_new((_WHOLE, place)):
            continue
        part: OwnPiece = getattr(split[0], _OWN)
        first_rank_log.warning(
            "smp: %s %s%s', of which each tensor-parallel rank has a slice, so the result is that "
            "of the slice; it is that of the whole inside of `with %s(model):`, on all ranks",
            place,
            _NUMBER if is_number else _MIXTURE,
            part.name,
            _WHOLE,
        )


def script_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost frame that is not one of torch; None if it is one of the library."""
    while frame is not None:
        room = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if room not in ("torch", "smp"):
            return frame
        if room == "smp":
            return None
        frame = frame.f_back
    return None


def _explain_slices(parameters: Iterable[nn.Parameter], error: RuntimeError) -> None:
    """Raises an explanation if shapes do not fit because they are those of slices."""
    for parameter in parameters:
        part: OwnPiece = getattr(parameter, _OWN)
        if interval_of(parameter) is not None and _WHOLE not in str(error):
            raise RuntimeError(
                f"{_C.rank_prefix()}'{part.name}' is split over tensor-parallel ranks, and is "
                f"{list(parameter.shape)} of {whole_shape(parameter)} here: {error}. It is whole "
                f"in model.state_dict(), and inside of `with {_WHOLE}(model):` between steps, on "
                "all ranks"
            ) from error


def _refuse_memory(parameter: nn.Parameter) -> None:
    part: OwnPiece | None = parameter.__dict__.get(_OWN)
    if part is not None and _key(part.piece) != _key(parameter):
        raise RuntimeError(
            f"{_C.rank_prefix()}other memory is assigned to '{part.name}' (parameter.data = ...), "
            f"of which this rank has {part.numel} of {parameter.numel()} elements, so it would "
            "reach nobody; write inside of `with smp.whole_parameters(model):`, on all ranks, or "
            "load a state dict"
        )


class ScriptParameter(nn.Parameter):
    """A parameter whose values are not all here, or are rounded here."""


class ScriptView(Tensor):
    """A tensor with the memory of such a parameter, from ``.data`` or ``.detach()``."""

    _smp_parameter: nn.Parameter

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saves a plain tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = memo[id(self)] = self.as_subclass(Tensor).clone()
        return copied


watch(ScriptParameter, _call)
watch(ScriptView, _call)


def _watched(args: Any, kwargs: Any) -> Iterator[tuple[Tensor, nn.Parameter]]:
    for leaf in pytree.tree_leaves((args, kwargs)):
        parameter = leaf._smp_parameter if isinstance(leaf, ScriptView) else leaf
        if isinstance(leaf, Tensor) and _OWN in parameter.__dict__:
            yield leaf, parameter


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else 0


def _shown(result: Tensor, known: dict[int, nn.Parameter]) -> Tensor:
    """Returns a result, which is watched too if it is memory of the parameter."""
    parameter = known.get(_key(result))
    if parameter is None or isinstance(result, ScriptParameter | ScriptView):
        return result
    view = result.as_subclass(ScriptView)
    view._smp_parameter = parameter
    return view


class _Mixing(TorchDispatchMode):
    """Sees whether operators of one call mix elements of a split parameter, or draw them.

    Attributes:
        split: split parameters, by their memory.
        mixes: whether an operator did.
    """

    def __init__(self, known: Mapping[int, nn.Parameter]) -> None:
        super().__init__()
        self.split = {key for key, p in known.items() if interval_of(p) is not None}
        self.mixes = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        if not self.split or _is_by_element(func) or func.is_view:
            return
        tensors = (t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        self.mixes |= any(_key(t) in self.split for t in tensors)


def _is_by_element(func: OpOverload) -> bool:
    """Returns whether each element of a result depends on those at its place at most."""
    packet, name = func.overloadpacket, func.overloadpacket.__name__
    if name.startswith("_foreach_"):
        return not name.startswith(("_foreach_norm", "_foreach_max", "_foreach_powsum"))
    return torch.Tag.pointwise in func.tags or packet in _PLAIN or name.endswith("_like")


class _Writes(_Mixing):
    """Intercepts the operators of one call that write to parameters."""

    def __init__(self, known: dict[int, nn.Parameter]) -> None:
        super().__init__(known)
        self._known = known

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._note(func, args, kwargs)
        written = dict(self._written(func, args, kwargs))
        if not written or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        by_element = torch.Tag.pointwise in func.tags or func.overloadpacket in _PLAIN_WRITES
        self._refuse_in_step(written.values(), func)
        whole = by_element and all(_is_like(t, p) for t, p in written.items())
        absent = [p for p in written.values() if is_placeholder(p)]
        if absent:
            target = next(iter(written))
            if not whole or len(written) > 1:
                raise _needs_others(absent[0], func)
            self._write_part(func, args, kwargs, target, written[target])
            return target
        result = func(*args, **kwargs)
        for target, parameter in written.items():
            part: OwnPiece = getattr(parameter, _OWN)
            if part.master is None and _key(part.piece) == _key(parameter):
                part.changed()  # the write was to the memory itself
            elif whole and len(written) == 1 and self._are_like(args, kwargs):
                self._write_part(func, args, kwargs, target, parameter)
            else:
                now = part.cut(parameter.detach(), parameter.shape).clone()
                write_values(part.piece, part.master, now)
                part.changed()
        return result

    def _are_like(self, args: Any, kwargs: Any) -> bool:
        tensors = (t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        return all(_is_like(t, p) for t in tensors if (p := self._known.get(_key(t))) is not None)

    def _refuse_in_step(self, parameters: Iterable[nn.Parameter], func: OpOverload) -> None:
        for parameter in parameters:
            part: OwnPiece = getattr(parameter, _OWN)
            is_copy = part.master is not None or _key(part.piece) != _key(parameter)
            if is_copy and _C.current_microbatch() >= 0:
                raise RuntimeError(
                    f"{_C.rank_prefix()}'{part.name}' is written to by {func} inside of a step "
                    "function, and each rank updates what it holds between steps; write there"
                )

    def _written(
        self, func: OpOverload, args: Any, kwargs: Any
    ) -> Iterator[tuple[Tensor, nn.Parameter]]:
        for tensor in written_tensors(func, args, kwargs):
            parameter = self._known.get(_key(tensor))
            if parameter is not None:
                yield tensor, parameter

    def _write_part(
        self, func: OpOverload, args: Any, kwargs: Any, target: Tensor, parameter: nn.Parameter
    ) -> None:
        """Applies a call for all elements to the elements of this rank."""
        part: OwnPiece = getattr(parameter, _OWN)
        own_args, own_kwargs = pytree.tree_map_only(
            Tensor, lambda t: self._own_elements(t, part, func, parameter), (args, kwargs)
        )
        if func.overloadpacket is _aten.copy_:
            write_values(part.piece, part.master, own_args[1].expand(part.piece.shape))
        else:
            func(*own_args, **own_kwargs)
            if part.master is not None:
                part.piece.copy_(part.master.detach().view(part.piece.shape))
        part.changed()

    def _own_elements(
        self, value: Tensor, part: OwnPiece, func: OpOverload, parameter: nn.Parameter
    ) -> Tensor:
        """Returns this rank's elements of an argument."""
        other = self._known.get(_key(value))
        if other is None:
            return part.cut(value, parameter.shape)
        held: OwnPiece = getattr(other, _OWN)
        if not _is_like(value, other) or (held.begin, held.numel) != (part.begin, part.numel):
            raise _needs_others(parameter, func)
        return held.piece if held.master is None else held.master.detach()


def _needs_others(parameter: nn.Parameter, func: OpOverload) -> RuntimeError:
    part: OwnPiece = getattr(parameter, _OWN)
    return RuntimeError(
        f"{_C.rank_prefix()}'{part.name}' is written to by {func}, which needs more than the "
        f"{part.numel} of its {parameter.numel()} elements that this rank has; clip, scale or mask "
        "all of it, or write to it inside of `with smp.whole_parameters(model):`, on all ranks"
    )


def _is_like(tensor: Tensor, parameter: nn.Parameter) -> bool:
    return tensor.shape == parameter.shape and tensor.stride() == parameter.stride()
