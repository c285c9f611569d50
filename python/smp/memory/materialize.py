"""The one place where parameters become real on a device or give up their memory.

All functions keep the ``Parameter`` object, so optimizers that were made before the model was
wrapped go on with the same parameters.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from smp import _C


def make_real(parameter: nn.Parameter, device: torch.device) -> None:
    """Moves a parameter of this rank to ``device``; shape, dtype and object stay.

    Raises:
        ValueError: for a parameter on the meta device, which has no values to move.
    """
    if parameter.is_meta:
        raise ValueError(
            "a parameter is on the meta device and has no values; its model initialises it when "
            "it is partitioned"
        )
    with torch.no_grad():
        if parameter.device != device:
            parameter.data = parameter.data.to(device)
        elif not parameter.data.is_contiguous():
            parameter.data = parameter.data.contiguous()


def make_placeholder(parameter: nn.Parameter, device: torch.device) -> None:
    """Frees the memory of a parameter that lives on another rank.

    Shape, dtype and device remain true; all elements share one NaN, so reading them by mistake
    shows in the loss instead of being silently wrong.
    """
    with torch.no_grad():
        value = _fill(parameter.dtype, device).expand(parameter.shape)
        if parameter.is_meta:
            _exchange(parameter, value)
        else:
            parameter.data = value
        parameter.grad = None


def cast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Changes the dtype of a parameter; placeholders stay without memory.

    Args:
        parameter: keeps its object. Its gradient is let go of.
        dtype: floating.
    """
    if parameter.dtype == dtype:
        return
    with torch.no_grad():
        is_placeholder = parameter.numel() > 1 and not any(parameter.stride())
        if is_placeholder:
            parameter.data = _fill(dtype, parameter.device).expand(parameter.shape)
        else:
            parameter.data = parameter.data.to(dtype)
        parameter.grad = None


def fill(parameter: nn.Parameter, value: Tensor) -> None:
    """Gives a parameter values, also one on the meta device; ``value`` is copied.

    Args:
        parameter: keeps its dtype, and its device unless that is meta.
        value: of the same shape.
    """
    if parameter.is_meta:
        _exchange(parameter, value.detach().to(parameter.dtype, copy=True).contiguous())
    else:
        with torch.no_grad():
            parameter.copy_(value)


def _fill(dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element that nobody initialises a tensor with: NaN, or the smallest integer."""
    if dtype.is_floating_point or dtype.is_complex:
        value: float | int | bool = float("nan")
    else:
        value = False if dtype == torch.bool else torch.iinfo(dtype).min
    return torch.full((), value, dtype=dtype, device=device)


def _exchange(parameter: nn.Parameter, value: Tensor) -> None:
    """Puts a tensor of another device type into a parameter, where ``.data =`` cannot."""
    other = nn.Parameter(value, requires_grad=parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)  # attributes change places, too, and are to stay
    torch.utils.swap_tensors(parameter, other)


# ---- delayed initialisation -----------------------------------------------------------


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Parameters of modules that are created inside are not allocated.

    They are on the meta device until the model is partitioned; then each rank allocates its own and
    initialises them with ``reset_parameters`` of their module or with ``_init_weights`` of the
    Hugging Face model around it. Random numbers depend on the seed and the module's name alone, so
    the values do not depend on the partition. Buffers are real at once.

    Args:
        enabled: without effect if False.
    """
    if not enabled:
        yield
        return
    original = nn.Module.register_parameter

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        if param is not None and not param.is_meta:
            self._parameters[name] = nn.Parameter(param.to("meta"), param.requires_grad)

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def initialise_delayed(
    root: nn.Module, is_local: Callable[[Tensor], bool], device: torch.device
) -> None:
    """Allocates and initialises what is on the meta device: local parameters, and all buffers.

    Args:
        root: the model; parameters of other ranks are still on the meta device, so that code which
            initialises a whole subtree passes them over.
        is_local: whether a parameter belongs to this rank.
        device: of this process.

    Raises:
        ValueError: names what no code of its module or model initialises.
    """
    delayed = _allocate(root, is_local, device)
    if not delayed:
        return
    touched = {id(tensor) for tensor, _ in delayed.values()}
    # Flags have no third value: what stays what it was filled with, both times, was not set.
    flags = {name: tensor for name, (tensor, _) in delayed.items() if tensor.dtype == torch.bool}
    outside = _C.RandomState.capture(str(device))
    seeds = _Seeds(device)
    names = {tensor.untyped_storage()._cdata: name for name, (tensor, _) in delayed.items()}
    try:
        with torch.no_grad(), _SeededByName(names, seeds):
            _initialise(root, "", touched, (), seeds)
            before = {name: tensor.clone() for name, tensor in flags.items()}
            for tensor in flags.values():
                tensor.fill_(True)
            if flags:
                _initialise(root, "", touched, (), seeds)
    finally:
        outside.restore()
    for name, (tensor, holder) in delayed.items():
        if not torch.equal(before[name], tensor) if name in flags else _has_fill(tensor):
            raise ValueError(
                f"{_C.rank_prefix()}nothing initialises '{name}', which was created on the meta "
                f"device; give {type(holder).__name__} a reset_parameters() that does, or create "
                "it outside of delay_param_initialization"
            )


_Delayed = dict[str, tuple[Tensor, nn.Module]]


def _allocate(
    root: nn.Module, is_local: Callable[[Tensor], bool], device: torch.device
) -> _Delayed:
    delayed: _Delayed = {}
    for prefix, module in root.named_modules():
        dot = f"{prefix}." if prefix else ""
        if isinstance(module, nn.RNNBase) and any(p.is_meta for p in module.parameters()):
            module._flat_weight_refs = []  # weak references forbid the exchange
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and is_local(parameter):
                value = _fill(parameter.dtype, device).expand(parameter.shape).contiguous()
                _exchange(parameter, value)
                delayed[dot + name] = (parameter, module)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                real = _fill(buffer.dtype, device).expand(buffer.shape).contiguous()
                module._buffers[name] = real
                delayed[dot + name] = (real, module)
    return delayed


def _initialise(
    module: nn.Module,
    name: str,
    touched: set[int],
    models: Sequence[nn.Module],
    seeds: _Seeds,
) -> bool:
    """Initialises a subtree if there is something to initialise in it, children first.

    Args:
        module, name: the subtree.
        touched: ids of the tensors to initialise.
        models: modules around it that know how to initialise others, the innermost last.
        seeds: of random numbers.
    """
    if callable(getattr(module, "_init_weights", None)):
        models = [*models, module]
    tensors = [*module._parameters.values(), *module._buffers.values()]
    wanted = any(id(tensor) in touched for tensor in tensors)
    for key, child in module.named_children():
        wanted |= _initialise(child, f"{name}.{key}" if name else key, touched, models, seeds)
    if wanted:
        seeds.set(name)
        for reset in ("reset_parameters", "_reset_parameters"):
            if callable(getattr(module, reset, None)):
                getattr(module, reset)()
        if models:
            models[-1]._init_weights(module)  # type: ignore[operator]
    return wanted


class _SeededByName(TorchDispatchMode):
    """Makes what is drawn for a tensor depend on its name alone.

    A module may initialise parameters below it in one loop, and draws nothing for those on the meta
    device, which are those of other ranks.
    """

    def __init__(self, names: Mapping[int, str], seeds: _Seeds) -> None:
        super().__init__()
        self._names = names
        self._seeds = seeds

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(args[0], Tensor):
            name = self._names.get(args[0].untyped_storage()._cdata)
            if name is not None:
                self._seeds.set(name)
        return func(*args, **(kwargs or {}))


class _Seeds:
    """Random numbers by name.

    Args:
        device: of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = str(device)
        # Asking later would give what was set here.
        self._base = torch.initial_seed() & (2**64 - 1)

    def set(self, name: str) -> None:
        """Seeds the generators for what has this name."""
        digest = hashlib.sha256(name.encode()).digest()
        seed = _C.mix_seed(self._base, int.from_bytes(digest[:4], "little"))
        _C.seed_generators(seed, self._device)


def _has_fill(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return bool((tensor == _fill(tensor.dtype, tensor.device)).any())
